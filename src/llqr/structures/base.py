"""What every block structure of U can do; and Scalar, Diagonal and Dense, which are linear in their tensors.

A structure says how a block of U is stored and how it acts. It is written for a stack: `x` has shape `(k, *shape)`, one
gradient for each of k blocks of one shape, and each of the block's tensors has the same leading dimension k.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import NamedTuple, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from llqr.checks import ShownWithOptions
from llqr.curvature.precision import at_least_single
from llqr.errors import LLQRError, NonFiniteError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Tensors = Mapping[str, Tensor]
Damping = float | Tensor
"""λ as a share of the mean curvature: one for all of a stack, or one for each, (k,)."""


class Linearization(NamedTuple):
    """U x at one value of the tensors, with its derivatives by them."""

    value: Callable[[], Tensor]
    """U x."""
    derivative: Callable[[Tensors], Tensor]
    """d(U x) along a change of the tensors."""
    pullback: Callable[[Tensor], dict[str, Tensor]]
    """The gradient of ⟨P, U x⟩ by the tensors, given P."""


class Structure(ShownWithOptions, ABC):
    """How the blocks of U are stored and how they act.

    One of your own says how it begins (`identity`), how it acts (`apply`), and two things about that (`degree`, `scaled`); the
    rest follows.
    """

    def sizes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The name and shape of each tensor of a block for a parameter of this shape: as `identity` makes them."""
        made = self.identity(shape, torch.empty(0, device="meta"))
        return {name: tuple(tensor.shape[1:]) for name, tensor in made.items()}

    @abstractmethod
    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        """`count` blocks that leave everything as it is; dtype (at least float32) and device are those of `like`."""

    @abstractmethod
    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        """U x."""

    def linearize(self, tensors: Tensors, x: Tensor) -> Linearization:
        """U x and its derivatives, which are autograd's where a structure doesn't write them out."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        ends: list[GradientEdge] = []  # of autograd's graph, which doesn't hold U x itself

        def value() -> Tensor:
            with torch.enable_grad():
                y = self.apply(leaves, x)
            ends[:] = [get_gradient_edge(y)]
            return y.detach()

        def derivative(change: Tensors) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda at: self.apply(at, x), (dict(tensors),), (dict(change),))[1]
            return moved

        def pullback(cotangent: Tensor) -> dict[str, Tensor]:
            if not ends:
                value()
            inputs = list(leaves.values())
            found = torch.autograd.grad(ends, inputs, cotangent, retain_graph=True, materialize_grads=True)
            return dict(zip(leaves, found, strict=True))

        return Linearization(value, derivative, pullback)

    @abstractmethod
    def degree(self, shape: Sequence[int]) -> int:
        """The degree of U x as a polynomial in the tensors of a block for a parameter of this shape."""

    @abstractmethod
    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        """The tensors of factor · U, for a positive factor."""

    def second_moments(self, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """What `closed_form` needs of the gradients v = rows ⊗ columns of linear maps, summed over the T places where they act.

        `rows` has shape (k, T, r) and `columns` (k, T, c). Three names are taken: "rows" and "columns" are Σ rows rowsᵀ and
        Σ columns columnsᵀ, or their diagonals, whose Kronecker product is H; "whole" is H. Other moments have other names.
        """
        raise self._without_closed_form()

    def mean_curvature(self, moments: Tensors) -> Tensor:
        """The mean of H's diagonal, (k,), which L2 is compared with; here of "rows" and "columns", or of "whole"."""
        if moments.keys() not in ({"rows", "columns"}, {"whole"}):
            raise LLQRError(
                f"{self!r} keeps moments of its own, {', '.join(map(repr, moments))}, and a divergence with L2 asks for the "
                "mean of H's diagonal: write mean_curvature(moments), one number for each block"
            )
        means = [(m if m.dim() == 2 else m.diagonal(dim1=1, dim2=2)).mean(1) for m in moments.values()]
        return torch.stack(means).prod(0)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """The tensors of (H + λ)⁻¹ within this structure, H the second moments; λ is `damping` times their mean diagonal."""
        raise self._without_closed_form()

    def check_closed_form(self) -> None:
        """Raise for a structure that says only how it acts, which is enough for the paper's fit."""
        kind = type(self)
        if kind.second_moments is Structure.second_moments or kind.closed_form is Structure.closed_form:
            raise self._without_closed_form()

    def _without_closed_form(self) -> LLQRError:
        return LLQRError(f"{self!r} has no closed form: write second_moments() and closed_form(), or use LLQR.paper")

    def spread(self, shape: Sequence[int]) -> int:
        """How many numbers the block spreads the gradient's squared norm over: n for a diagonal, 1 for mixing blocks."""
        return 1

    def memory(self, shape: Sequence[int], itemsize: int = 4) -> int:
        """Bytes that one block takes for a parameter of this shape."""
        return itemsize * sum(math.prod(size) for size in self.sizes(shape).values())


class LinearStructure(Structure):
    """A structure that is linear in its tensors."""

    def linearize(self, tensors: Tensors, x: Tensor) -> Linearization:
        """The derivative is the action of the change."""
        return super().linearize(tensors, x)._replace(derivative=lambda change: self.apply(change, x))

    def degree(self, shape: Sequence[int]) -> int:
        return 1

    def scaled(self, tensors: Tensors, factor: float) -> dict[str, Tensor]:
        return {name: tensor * factor for name, tensor in tensors.items()}


def eye(size: int, like: Tensor, count: int) -> Tensor:
    """`count` identity matrices, (count, size, size)."""
    stack = torch.zeros(count, size, size, dtype=at_least_single(like.dtype), device=like.device)
    stack.diagonal(dim1=1, dim2=2).fill_(1)
    return stack


def ones(shape: Sequence[int], like: Tensor, count: int) -> Tensor:
    """`count` tensors of ones, (count, *shape)."""
    return torch.ones(count, *shape, dtype=at_least_single(like.dtype), device=like.device)


def gram(x: Tensor) -> Tensor:
    """Σ_t x_t x_tᵀ of stacked rows, (k, T, n) to (k, n, n)."""
    return x.mT @ x


def damped_inverse(moment: Tensor, damping: Damping) -> Tensor:
    """(M + damping · mean(diag M))⁻¹, of matrices (k, n, n) or of diagonals (k, n)."""
    diagonal = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
    shift = damping * diagonal.mean(1) + torch.finfo(moment.dtype).tiny
    if moment.dim() == 2:
        return (moment + shift[:, None]).reciprocal()
    damped = moment.clone()
    damped.diagonal(dim1=1, dim2=2).add_(shift[:, None])
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed.any()):
        raise NonFiniteError("a second moment can't be inverted: its numbers are too far apart, or not finite")
    return torch.cholesky_inverse(factor)


LONG_SIDE = 192
"""Sides longer than this are inverted along their leading directions: the whole inverse would cost more than a training
step."""
LEADING = 64
"""How many: U was as good as with an eighth of the side (docs/findings.md)."""


def thin_inverse(moment: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
    """(M + γ)⁻¹ ≈ diag(w) - B Bᵀ, γ = damping · mean(diag M): B (k, n, r) and w (k, n).

    Nyström's approximation in the span of r columns Ω: M ≈ R Rᵀ + τ, with R = M Ω K⁻ᵀ, K Kᵀ = Ωᵀ M Ω, and τ the mean of the
    eigenvalues that R Rᵀ leaves out. So w = 1/c, c = τ + γ, and B = R L⁻ᵀ / √c with L Lᵀ = RᵀR + c. Ω comes from one product
    with M, from the same start each time: what U is depends on M alone.
    """
    side = moment.shape[2]
    mean = moment.diagonal(dim1=1, dim2=2).mean(1) + torch.finfo(moment.dtype).tiny
    start = _start(side, moment.dtype, moment.device).expand(len(moment), -1, -1)
    columns = moment @ start / mean[:, None, None]
    columns = _divided(columns, gram(columns))
    image = moment @ columns
    root = _divided(image, columns.mT @ image)
    products = gram(root)
    explained = products.diagonal(dim1=1, dim2=2)
    rest = ((mean * side - explained.sum(1)) / (side - LEADING)).clamp_min(0) + damping * mean
    explained += rest[:, None]
    basis = _divided(root, products) * rest.rsqrt()[:, None, None]
    return basis, rest.reciprocal()[:, None].expand(-1, side).contiguous()


ATTEMPTS = 12
"""Then more is added than there was; what isn't finite fails all of them."""


def _divided(columns: Tensor, products: Tensor) -> Tensor:
    """Y L⁻ᵀ, with L Lᵀ the products, and as much more on their diagonal as it takes for them to be positive in spite of
    rounding: eight units of it, or ten, a hundred, … times that where the numbers are far apart."""
    diagonal = products.diagonal(dim1=1, dim2=2)
    more = 8 * torch.finfo(columns.dtype).eps * diagonal.sum(1, keepdim=True) + torch.finfo(columns.dtype).tiny
    for _ in range(ATTEMPTS):
        diagonal += more
        factor, failed = torch.linalg.cholesky_ex(products)
        if not bool(failed.any()):
            break
        more = torch.where(failed[:, None] > 0, 10 * more, 0.0)
    divided: Tensor = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
    return divided


def kept(function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """As `lru_cache`, but where a mode of torch stands between (fake tensors, inference) it is called anew: what it makes there
    is of no use elsewhere."""
    cached = cast(Callable[[*Ts], T], lru_cache(maxsize=64)(function))

    @wraps(function)
    def call(*args: *Ts) -> T:
        anew = is_in_torch_dispatch_mode() or torch.is_inference_mode_enabled()
        return (function if anew else cached)(*args)

    return call


@kept
def _start(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random columns, always the same."""
    generator = torch.Generator("cpu").manual_seed(side)
    return torch.randn(side, LEADING, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)


@dataclass(frozen=True)
class Scalar(LinearStructure):
    """U x = u·x: a learned length for each parameter."""

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"u": ones((), like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return tensors["u"].reshape(-1, *(1 for _ in x.shape[1:])) * x

    def second_moments(self, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        return {"rows": gram(rows), "columns": gram(columns)}

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """tr H / (tr H² + λ tr H), of H = A ⊗ G."""
        traces = [moment.diagonal(dim1=1, dim2=2).sum(1) for moment in moments.values()]
        squares = [moment.square().sum((1, 2)) for moment in moments.values()]
        numbers = [moment.shape[1] for moment in moments.values()]
        trace = traces[0] * traces[1]
        shift = damping * trace / (numbers[0] * numbers[1]) + torch.finfo(trace.dtype).tiny
        return {"u": trace / (squares[0] * squares[1] + shift * trace + torch.finfo(trace.dtype).tiny)}


@dataclass(frozen=True)
class Diagonal(LinearStructure):
    """U x = d ∘ x, with d of the parameter's shape."""

    def spread(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"d": ones(shape, like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return tensors["d"] * x

    def linearize(self, tensors: Tensors, x: Tensor) -> Linearization:
        """Without autograd: for small blocks its graph costs more than the products."""
        d = tensors["d"]
        return Linearization(lambda: d * x, lambda change: change["d"] * x, lambda cotangent: {"d": cotangent * x})

    def second_moments(self, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        return {"squares": rows.square().mT @ columns.square()}

    def mean_curvature(self, moments: Tensors) -> Tensor:
        return moments["squares"].flatten(1).mean(1)

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """1/(h + λ), h the diagonal of H."""
        squares = moments["squares"]
        shift = damping * squares.flatten(1).mean(1) + torch.finfo(squares.dtype).tiny
        return {"d": (squares + shift.reshape(-1, 1, 1)).reciprocal()}


@dataclass(frozen=True)
class Dense(LinearStructure):
    """vec(U x) = U vec(x), U of n × n for a block of n numbers: exact for a block, and only for small ones."""

    def identity(self, shape: Sequence[int], like: Tensor, count: int = 1) -> dict[str, Tensor]:
        return {"U": eye(math.prod(shape), like, count)}

    def apply(self, tensors: Tensors, x: Tensor) -> Tensor:
        return torch.bmm(tensors["U"], x.reshape(len(x), -1, 1)).reshape(x.shape)

    def second_moments(self, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        return {"whole": gram((rows[..., None] * columns[:, :, None]).flatten(2))}

    def closed_form(self, moments: Tensors, damping: Damping) -> dict[str, Tensor]:
        """(H + λ)⁻¹."""
        return {"U": damped_inverse(moments["whole"], damping)}
