"""What LLQR does, in one file for reading. It runs, and the tests compare the library with it, number for number.

    A, G  second moments of a layer's inputs a, and of the gradients b at its outputs: the curvature is about A ⊗ G
    U X = (G + √λ ḡ)⁻¹ X (A + √λ ā)⁻¹,   ḡ and ā the means of the diagonals
    Δ, m  the base's step by the raw gradients, and its momentum, as Nesterov has it
    θ   ← θ - ‖Δ‖ U m / ‖U m‖,   tensor by tensor; no step more than twice as long as of late

`MinimalLLQR` is that, for `nn.Linear` and `nn.Conv2d` whose weights nothing else uses; the base steps all other parameters.
There is no safety, no speed and no checkpoint, and `maximize`, Muon's momentum and data of mostly zeros aren't known: train
with `llqr.LLQR`. At the end is the paper's own method, `fit_along_gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

Tensors = dict[str, Tensor]

MEMORY = 0.8  # how much a refit counts beside the next one
PLACES = 512  # of a batch, at which a layer is looked at
LONG_SIDE, LEADING = 192, 64  # longer sides of a matrix are inverted in the span of so many columns
LONGEST_GAP = 40  # steps between refits
RECENT, KNOWN, LEAP, IDLE = 0.95, 10.0, 2.0, 0.1  # of the lengths of steps: how they are averaged, and their bounds
STEEPNESS = 0.15  # the least cosine between a step and -m
OWN_MOMENTUM = 0.9  # around bases that don't show theirs
AVERAGING = (Adam, AdamW, NAdam, RAdam, Adamax)  # bases whose momentum is `exp_avg`
COUPLED = (SGD, Adam, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, ASGD)  # whose weight decay is in the gradient


class MinimalLLQR:
    """`draw`: from the model's output and a generator to random slopes there, as `categorical`; None: the loss's own."""

    def __init__(
        self, base: Optimizer, model: nn.Module, draw: Callable[[Tensor, torch.Generator], Tensor] | None = None
    ) -> None:
        self.base, self.draw, self.drawing = base, draw, False
        self.steps, self.next_refit = 0, 0
        self.averages: dict[Tensor, Tensor] = {}
        self.lengths: dict[Tensor, tuple[float, float]] = {}
        self.layers = [Layer(module) for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        for layer in self.layers:
            layer.module.register_forward_hook(partial(self._listen, layer))
        model.register_forward_hook(self._send_back)

    def _listen(self, layer: Layer, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """In the forward pass before a refit: take a now, and b when it comes back."""
        if self.steps == self.next_refit and output.requires_grad:
            layer.reads_data &= inputs[0].grad_fn is None
            count = partial(layer.count, inputs[0].detach())
            wanted = self.draw is not None
            output.register_hook(lambda b: count(b) if self.drawing == wanted else None)  # type: ignore[no-untyped-call]

    def _send_back(self, model: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """v = Jᵀ Q^½ ε, with E[v vᵀ] = H: drawn slopes go back through the model, before those of the loss do."""
        if self.draw is not None and self.steps == self.next_refit and output.requires_grad:
            slope = self.draw(output.detach(), torch.Generator(output.device).manual_seed(0x11C9 + self.steps))
            trained = [p for p in model.parameters() if p.requires_grad]
            self.drawing = True
            torch.autograd.grad(output, trained, slope, retain_graph=True, allow_unused=True)
            self.drawing = False

    def zero_grad(self) -> None:
        self.base.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        if self.steps == self.next_refit:  # the first eleven steps, then after a tenth of the steps so far
            self.next_refit += min(1 + self.steps // 10, LONGEST_GAP)
            for layer in self.layers:
                layer.refit()
        self.steps += 1
        groups = {p: group for group in self.base.param_groups for p in group["params"] if p.grad is not None}
        before = {p: p.clone() for p in groups}
        slopes = {p: p.grad + self._decays(group)[0] * p for p, group in groups.items()}
        for p, slope in slopes.items():
            self.averages[p] = self.averages.get(p, torch.zeros_like(p)).lerp(slope, 1 - OWN_MOMENTUM)
        self.base.step()
        for layer in self.layers:
            tensors = list(layer.module.parameters())  # W and its bias
            if not layer.refits or not all(p in groups for p in tensors):
                continue
            momenta = [self._momentum(p, slopes[p], groups[p]) for p in tensors]
            for p, m, d in zip(tensors, momenta, layer.precondition(momenta), strict=True):
                start = before[p] * (1 - groups[p]["lr"] * self._decays(groups[p])[1])
                p.copy_(start - self._bounded(p, float((p - start).norm()), groups[p]) * steep_direction(d, m))

    def _bounded(self, p: Tensor, length: float, group: dict[str, Any]) -> float:
        """At most twice the root mean square of the lengths before, each divided by its learning rate."""
        squares, weight = self.lengths.get(p, (0.0, 0.0))
        rate = group["lr"] or 1.0  # of a warm-up's first step it may be 0
        length = length / rate
        usual = (squares / weight) ** 0.5 if weight else length
        length = min(length, LEAP * usual) if weight > KNOWN else length
        if length > IDLE * usual:  # else the layer isn't used for a while
            self.lengths[p] = RECENT * squares + length**2, RECENT * weight + 1
        return float(length * rate)

    def _momentum(self, p: Tensor, slope: Tensor, group: dict[str, Any]) -> Tensor:
        """As Nesterov's step has it: this step's gradient counts once more than in what the base remembers."""
        if type(self.base) is SGD:
            if not group["momentum"]:
                return slope
            return slope.mul(1 - group["dampening"]).add(self.base.state[p]["momentum_buffer"], alpha=group["momentum"])
        if type(self.base) in AVERAGING:
            return slope.lerp(self.base.state[p]["exp_avg"], float(group["betas"][0]))
        return slope.lerp(self.averages[p], OWN_MOMENTUM)

    def _decays(self, group: dict[str, Any]) -> tuple[float, float]:
        """Weight decay in the gradient, and beside the step."""
        decay = float(group.get("weight_decay", 0.0))
        coupled = isinstance(self.base, COUPLED) and not group.get("decoupled_weight_decay")
        return (decay, 0.0) if coupled else (0.0, decay)


def steep_direction(d: Tensor, m: Tensor) -> Tensor:
    """d/‖d‖; where that is almost at right angles to m, as much of m is added as makes their cosine `STEEPNESS`."""
    d, e = d / d.norm(), m / m.norm()
    cosine = (d * e).sum()
    across = d - cosine * e
    return d if cosine >= STEEPNESS else STEEPNESS * e + (1 - STEEPNESS**2) ** 0.5 * across / across.norm()


class Layer:
    """The curvature of one layer y = W a + bias, and its block of U. A convolution of g groups is a stack of g matrices."""

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.module, self.groups = module, getattr(module, "groups", 1)
        self.reads_data = True  # and not what other layers made of them: such inputs may be in any units
        self.counted: list[tuple[Tensor, Tensor, int]] = []  # Σ a aᵀ, Σ b bᵀ and the number of places, use by use
        self.refits, self.A, self.G = 0, torch.zeros(()), torch.zeros(())  # averages over refits

    @torch.no_grad()
    def count(self, a: Tensor, b: Tensor) -> None:
        """Sum a aᵀ and b bᵀ over the places where W acts: examples, positions of a sequence or of a picture."""
        m = self.module
        if isinstance(m, nn.Conv2d):
            mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
            a = functional.pad(a, m._reversed_padding_repeated_twice, mode)
            a, b = functional.unfold(a, m.kernel_size, m.dilation, 0, m.stride).mT, b.flatten(2).mT
        a, b = (x.reshape(x[..., 0].numel(), self.groups, -1).transpose(0, 1) for x in (a, b))  # (g, places, n)
        a = a if m.bias is None else functional.pad(a, (0, 1), value=1.0)
        places = a.shape[1]
        a, b = (x[:, spread_places(places)] for x in (a, b))
        times = places / a.shape[1]
        self.counted.append((times * a.mT @ a, times * b.mT @ b, places))

    def refit(self) -> None:
        """Average the curvature, A a mean over places and G a sum, and invert it."""
        if not self.counted:
            return
        inputs, slopes, places = zip(*self.counted, strict=True)
        self.counted, self.refits = [], self.refits + 1
        share = (1 - MEMORY) / (1 - MEMORY**self.refits)
        self.A = self.A + share * (torch.stack(inputs).sum(0) / sum(places) - self.A)
        self.G = self.G + share * (torch.stack(slopes).sum(0) - self.G)
        root = (0.1 + 1000 / self.refits**3) ** 0.5  # √λ, larger at first, when few examples were seen
        sizes = self.A.diagonal(dim1=1, dim2=2)
        sizes = sizes / sizes.mean(1, keepdim=True)
        units = torch.where(sizes > 1e-6, sizes, 1.0).pow(-0.25 if self.reads_data else 0.0)
        pairs = units[:, :, None] * units[:, None]  # U for the inputs units ∘ a, and back to a's own units
        self.left, self.right = damped_inverse(self.G, root), damped_inverse(self.A * pairs, root) * pairs

    def precondition(self, tensors: list[Tensor]) -> list[Tensor]:
        """U X, with X the weight's tensor and the bias's as one more column."""
        columns = [x.reshape(self.groups, self.left.shape[1], -1) for x in tensors]
        joined = self.left @ torch.cat(columns, 2) @ self.right
        parts = torch.split(joined, [x.shape[2] for x in columns], 2)
        return [part.reshape(x.shape) for part, x in zip(parts, tensors, strict=True)]


def damped_inverse(M: Tensor, share: float) -> Tensor:
    """(M + γ)⁻¹, γ a share of the mean of M's diagonal. Of a long side M ≈ N + τ, by Nyström's approximation."""
    n, eye = M.shape[-1], torch.eye(M.shape[-1]).to(M)
    mean = M.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    if n > LONG_SIDE:
        start = torch.randn(n, LEADING, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(M)
        Q = torch.linalg.qr(M @ start / mean).Q
        N = M @ Q @ torch.linalg.pinv(Q.mT @ M @ Q, hermitian=True) @ Q.mT @ M
        rest = (M - N).diagonal(dim1=1, dim2=2).sum(1).clamp_min(0) / (n - LEADING)  # τ
        M = N + rest[:, None, None] * eye
    return torch.linalg.inv(M + share * mean * eye)  # type: ignore[no-any-return]


def spread_places(count: int) -> Tensor:
    """All places, or `PLACES` of them in steps of about the golden section, which falls in with no period of the data."""
    stride = max(1, round(0.6180339887 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return torch.arange(min(count, PLACES)).mul(stride).remainder(count)


def categorical(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Slopes of the mean cross-entropy, but for labels drawn from the model: with them H is the Fisher matrix ("ngd")."""
    p = logits.softmax(-1)
    labels = torch.multinomial(p.flatten(0, -2), 1, generator=generator).reshape(p.shape[:-1])
    return (p - functional.one_hot(labels, p.shape[-1])).div(labels.numel() ** 0.5)


# --- the paper's method: U fitted to one gradient ---


def fit_along_gradient(
    loss: Callable[[Tensors], Tensor],
    divergence: Callable[[Tensors], Tensor],
    parameters: Tensors,
    structure: str,
    steps: int = 25,
    lr: float = 0.005,
    momentum: float = 0.9,
    clip: float = 5.0,
) -> dict[str, Tensors]:
    """U that makes J(U) = g·δ + ½ δ·Hδ small, δ = -U g: g the gradient of the loss, H = ∇²D of the divergence, at θ_k.

    Both are functions of the parameters. For the natural gradient D is `kl`; for Newton's step it is the loss.
    """
    g = grad(loss)(parameters)

    def objective(u: dict[str, Tensors]) -> Tensor:
        step = {name: -apply(u[name], x) for name, x in g.items()}
        bent = jvp(grad(divergence), (parameters,), (step,))[1]
        return torch.stack([((g[name] + 0.5 * bent[name]) * step[name]).sum() for name in g]).sum()

    u = {name: identity(structure, p) for name, p in parameters.items()}
    velocity = {name: {key: torch.zeros_like(t) for key, t in block.items()} for name, block in u.items()}
    for _ in range(steps):
        for name, slopes in grad(objective)(u).items():
            for key, slope in slopes.items():
                clipped = slope * (clip / slope.norm()).clamp(max=1)
                velocity[name][key] = momentum * velocity[name][key] + clipped
                u[name][key] = u[name][key] - lr * velocity[name][key]
    return u


def identity(structure: str, p: Tensor) -> Tensors:
    """The block of U = I for a parameter (m, ...), seen as m × n; K-FAC's and E-KFAC's for a vector are diagonal."""
    if structure not in ("scalar", "diagonal", "kfac", "ekfac", "dense"):
        raise ValueError(f"the structure is scalar, diagonal, kfac, ekfac or dense, not {structure!r}")
    if structure == "scalar":
        return {"u": p.new_ones(())}
    if structure == "dense":
        return {"U": torch.eye(p.numel()).to(p)}
    if structure == "diagonal" or p.dim() < 2:
        return {"d": torch.ones_like(p)}
    left, right = (torch.eye(side).to(p) for side in (len(p), p[0].numel()))
    return (
        {"C": left, "D": right}
        if structure == "kfac"
        else {"Q_L": left, "Q_R": right, "s": torch.ones_like(p).flatten(1)}
    )


def apply(u: Tensors, x: Tensor) -> Tensor:
    """U x: u x, d ∘ x, U vec(x), C X Dᵀ, or Q_L (s ∘ (Q_Lᵀ X Q_R)) Q_Rᵀ."""
    if "u" in u or "d" in u:
        return u["u" if "u" in u else "d"] * x
    if "U" in u:
        return (u["U"] @ x.flatten()).reshape(x.shape)
    X = x.flatten(1)
    if "C" in u:
        return (u["C"] @ X @ u["D"].T).reshape(x.shape)
    return (u["Q_L"] @ (u["s"] * (u["Q_L"].T @ X @ u["Q_R"])) @ u["Q_R"].T).reshape(x.shape)


def kl(model: nn.Module, inputs: Tensor) -> Callable[[Tensors], Tensor]:
    """D(θ_k, θ) = Σ KL(p_k ‖ p_θ) over the batch, for a model that returns logits: the paper's natural gradient."""
    here = model(inputs).log_softmax(-1).detach()

    def divergence(parameters: Tensors) -> Tensor:
        there = functional_call(model, parameters, (inputs,)).log_softmax(-1)
        return functional.kl_div(there, here, reduction="sum", log_target=True)

    return divergence
