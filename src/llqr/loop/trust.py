"""Trust: J of the step that the base takes, and how far U may lengthen it.

The base steps by U g times a rate, and the paper's J asks what U g itself would do. Where curvature is small, as on the plateau
that training begins on, its U is of the order of 1/curvature; once the curvature has grown, such steps are too long, and
training diverges. So with ε = -U g

    J(U) = g·ε + ½ ε·(η H + ρ I) ε,

where η puts H in units of the base's *edge of stability*: beyond η·curvature = 1 the base's steps grow (that is a curvature of
2/lr without momentum m, and of 2(1 + m)/lr with it). Fitted to this, U ≈ (ηH + ρ)⁻¹ brings no direction beyond the edge, and
lengthens none by more than 1/ρ. Around Adam, where U acts on its updates, the same holds in Adam's own coordinates
(`llqr.loop.updates`). Where it acts on the gradients of a base that normalises its steps (Adam, Muon), there is no η in these
units; it is 1/(g·Hg/g·g) then, so that ρ is relative to the curvature along the gradient.

ρ is *earned*. It begins at 1, where U only shortens. At each refit the U in use is tried on the new batch: with ε = -U g,
η ε·Hε/(-g·ε) says how near the edge it has come, with other data and after the steps since it was fitted. Well inside, ρ is
divided by 3, down to 0.1 (to 0.33 on Adam's updates); outside, multiplied; far outside, U begins anew at ρ = 1, and ρ may not
become that small again.

Between refits U g is *bounded*: it is made no longer than 1.5 times what it was in the step that U was fitted in, or than g
where that is longer; and no longer than three times that (a limit that rises slowly) in any case, for then something has
changed that U doesn't know. Where more than a quarter of the steps since the last refit had to be bounded, the gradients grow
under U, and ρ is multiplied too.
docs/findings.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from llqr.errors import LLQRError
from llqr.loop.updates import Measured
from llqr.precision import is_low
from llqr.preconditioner import Preconditioner
from llqr.solvers import Quadratic, bend
from llqr.solvers.totals import Totals, totals_of
from llqr.steering import Steered

if TYPE_CHECKING:
    from llqr.distributed.division import Division
    from llqr.distributed.sharing import Shared

CAUTIOUS, BOLD, BOLD_ON_UPDATES = 1.0, 0.1, 1 / 3
"""ρ at the start, and where U has proved itself: around SGD, and on Adam's updates, whose lengths are set by the noise of the
gradients as much as by curvature, which is all that U sees."""
FACTOR = 3.0
"""From one ρ to the next."""
INSIDE, OUTSIDE, FAR_OUTSIDE = 0.5, 1.0, 2.0
"""How near the edge a U has come."""
LONGER, MUCH_LONGER = 1.5, 3.0
"""How long U g may become, relative to the step that U was fitted in: where g hasn't grown that much, and where it has."""
SLOWLY = 100
"""Steps in which the second grows by as much as it was: gradients may grow, if they take their time."""
RESTLESS = 0.25
"""The share of steps that had to be bounded, beyond which U is trusted less."""

Steering = Mapping[str, Tensor | None]
"""U g by parameter; None where there is no gradient."""


@dataclass(frozen=True)
class Verdict:
    """What a refit makes of the U in use: ρ for the fit, what it may come to, and whether U has to go."""

    rho: float
    least: float
    outdated: bool = False


@dataclass
class Trust:
    """What U has earned so far."""

    rho: float
    earned: bool
    """ρ changes from refit to refit; else it is as it was given."""
    bounds: bool
    """The length of U g matters to the base."""
    least: float = BOLD
    """What ρ may come to."""
    length: float | None = None
    """‖U g‖ in the step that U was fitted in; None until that step is taken, and where lengths don't matter."""
    rate: float | None = None
    """The learning rate that U was fitted for."""
    steps: int = 0
    bounded: int = 0
    """Since that fit: steps that were looked at, and those of them that were bounded."""

    def judged(self, edge: float | None, restless: float = 0.0) -> Verdict:
        """By how near the edge the U in use is on a new batch (None says nothing), and by the share of its steps that were
        bounded."""
        if not self.earned:
            return Verdict(self.rho, self.least)
        if edge is not None and edge > FAR_OUTSIDE:
            return Verdict(CAUTIOUS, min(CAUTIOUS / FACTOR, max(self.least, FACTOR * self.rho)), outdated=True)
        if restless > RESTLESS or (edge is not None and edge > OUTSIDE):
            return Verdict(min(CAUTIOUS, FACTOR * self.rho), self.least)
        if edge is not None and edge < INSIDE:
            return Verdict(max(self.least, self.rho / FACTOR), self.least)
        return Verdict(self.rho, self.least)

    def restless(self, totals: Totals) -> float:
        """The share of the steps since the last fit that had to be bounded: for all ranks the same."""
        steps, bounded = totals.sums([float(self.steps), float(self.bounded)])
        return bounded / steps if steps else 0.0

    def accept(self, verdict: Verdict, base: Optimizer) -> None:
        """U was fitted with this ρ, for the base as it is now."""
        self.rho, self.least = verdict.rho, verdict.least
        self.length, self.rate = None, _largest_rate(base) or None
        self.steps = self.bounded = 0

    def bound(
        self, steered: Steering, length: float, plain: Callable[[], float], base: Optimizer | None = None
    ) -> Steering:
        """U g as long as it may be, given ‖U g‖ and ‖g‖.

        A rate that has risen since the fit, and that no schedule had told of, makes the same U g a longer step.
        """
        if self.length is None and 0 < length < math.inf:
            self.length = length
        if self.length is None:
            return steered
        self.steps += 1
        now = None if base is None else _largest_rate(base)
        fitted = self.length * (min(1.0, self.rate / now) if self.rate and now else 1.0)
        if not LONGER * fitted < length < math.inf:
            return steered
        most = MUCH_LONGER * (1 + self.steps / SLOWLY) * fitted
        factor = min(most, max(plain(), LONGER * fitted)) / length
        if factor >= 1:
            return steered
        self.bounded += 1
        # not in place: what a structure leaves alone is the gradient itself
        return {n: None if part is None else factor * part for n, part in steered.items()}

    def __str__(self) -> str:
        return f"{self.rho:g}, earned" if self.earned else f"{self.rho:g}"

    def agreed(self) -> tuple[float, float]:
        """What ranks have to have in common; the length is a sum, and may differ in its last digit."""
        return self.rho, self.least

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in SAVED}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what another had earned; a fixed ρ stays."""
        self.length, self.rate = state.get("length") if self.bounds else None, state.get("rate")
        self.steps, self.bounded = state.get("steps", 0), state.get("bounded", 0)
        if self.earned:
            floor = BOLD if self.bounds else BOLD_ON_UPDATES
            self.least = max(floor, state.get("least", floor))
            self.rho = max(self.least, state.get("rho", CAUTIOUS))


COUNTS = ("steps", "bounded")
SAVED = ("rho", "least", "length", "rate", *COUNTS)


def check_saved(state: Any) -> dict[str, Any]:
    """What a state has of it; a state from before there was any has nothing."""
    found = dict(state) if isinstance(state, Mapping) else {}
    for name, value in found.items():
        if name in COUNTS:
            right = type(value) is int and 0 <= value < 2**63
        else:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            right = name in SAVED and (number or (value is None and name in ("length", "rate")))
        if not right:
            raise LLQRError(
                f"the state's trust has {name!r} = {value!r}; it should have positive numbers for {', '.join(SAVED)}, and the "
                "last two may be 0"
            )
    if found.get("bounded", 0) > found.get("steps", 0):
        raise LLQRError(f"the state's trust has bounded {found['bounded']} of {found.get('steps', 0)} steps")
    return found


def bounded_steps(
    trust: Trust | None,
    base: Optimizer,
    steered: Steered | Shared,
    gradients: Mapping[str, Tensor],
    division: Division | None,
) -> Steering:
    """U g no longer than it may be."""
    if trust is None or not trust.bounds:
        if trust is not None:
            trust.steps += 1
        return steered.gradients
    if not isinstance(steered, Steered) and division is not None:
        lengths = [norm_of(steered.own_steered.values()), norm_of(steered.own.values())]
        length, plain = division.ranks.norms(lengths)  # from the owners: the same for all
        return trust.bound(steered.gradients, length, lambda: plain, base)
    known = steered.gradients
    found = steered.length if isinstance(steered, Steered) else None
    length = norm_of(known.values()) if found is None else found
    return trust.bound(known, length, lambda: norm_of(map(gradients.get, known)), base)


def trust_of(base: Optimizer, trust: float | None, default_solver: bool, on_updates: bool = False) -> Trust | None:
    """As the options of LLQR say; None is the paper's objective."""
    if trust is None and not default_solver:
        return None
    if trust is not None and not check_trust(trust):
        return None
    plain = isinstance(base, SGD)
    earned = trust is None and (plain or on_updates)
    rho = float(trust) if trust is not None else CAUTIOUS if earned else BOLD
    return Trust(rho, earned, bounds=plain, least=BOLD_ON_UPDATES if on_updates else BOLD)


class Trusted:
    """A quadratic model with √η H √η + ρ I in place of H; η may differ between parameters."""

    def __init__(self, model: Quadratic, rates: Mapping[str, float], trust: float) -> None:
        self.gradient, self.totals = model.gradient, totals_of(model)
        self.trust = trust
        self._model = model
        self._roots = {name: math.sqrt(rates[name]) for name in model.gradient}

    def curvature(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        product = self._model.curvature({name: self._roots[name] * v for name, v in direction.items()})
        return {n: torch.add(self.trust * v, product[n], alpha=self._roots[n]) for n, v in direction.items()}

    def bend(self, direction: dict[str, Tensor]) -> float:
        square = sum(float((v * v).sum()) for v in direction.values())
        return self._curved(direction) + self.trust * square

    def edge(self, u: Preconditioner) -> float | None:
        """How near the edge of stability the base's steps by U g are: η ε·Hε / (-g·ε), 1 at the edge.

        None where that can't be told: no gradient, no curvature, or more of it than can be represented.
        """
        step = {**self.gradient, **u.steer(dict(self.gradient)).gradients}
        along = sum(float((g * step[name]).sum()) for name, g in self.gradient.items())
        along, curved = self.totals.sums([along, self._curved(step)])
        return abs(curved) / along if along > 0 and 0 < abs(curved) < math.inf else None

    def _curved(self, direction: Mapping[str, Tensor]) -> float:
        return bend(self._model, {name: self._roots[name] * v for name, v in direction.items()})


def trusted(
    model: Quadratic,
    base: Optimizer,
    parameters: Mapping[str, Tensor],
    trust: float,
) -> Trusted:
    """The model of the step that this base takes: by U g, or by its update where the model is in Adam's coordinates."""
    on_updates = isinstance(model, Measured)
    if not on_updates and not isinstance(base, SGD):
        return Trusted(model, dict.fromkeys(parameters, _inverse_curvature(model)), trust)
    of_group = _rate_of_updates if on_updates else _rate
    rates = {id(p): of_group(group) for group in base.param_groups for p in group["params"]}
    return Trusted(model, {name: rates[id(p)] for name, p in parameters.items()}, trust)


def check_trust(trust: float) -> float:
    if isinstance(trust, bool) or not isinstance(trust, (int, float)) or not 0 <= trust < math.inf:
        raise LLQRError(
            "trust is a positive number (U lengthens no step by more than about 1/trust), or 0 for the paper's objective; "
            f"not {trust!r}"
        )
    return float(trust)


def _rate(group: Mapping[str, Any]) -> float:
    """1/curvature at the edge of stability: gradient descent with heavy-ball momentum m is stable up to lr·λ = 2(1 + m), and
    with Nesterov's up to 2(1 + m)/(1 + 2m).

    lr is the largest that a schedule tells of: a U fitted during a warm-up has to serve what comes after it.
    """
    momentum = float(group["momentum"])
    look_ahead = 1 + 2 * momentum if group["nesterov"] else 1.0
    share = max(0.0, 1 - float(group["dampening"]) * (momentum > 0))
    return _told_rate(group) * share * look_ahead / (2 * (1 + momentum))


def _rate_of_updates(group: Mapping[str, Any]) -> float:
    """The same for Adam in its own coordinates: a momentum m that averages is stable up to lr·λ = 2(1 + m)/(1 - m).

    m is the least that a schedule tells of, as lr is the largest.
    """
    momentum = min(float(group["betas"][0]), float(group.get("base_momentum", 1.0)))
    return _told_rate(group) * (1 - momentum) / (2 * (1 + momentum))


def _told_rate(group: Mapping[str, Any]) -> float:
    """The largest that the group tells of; optimizers without a rate tell of none."""
    names = ("lr", "initial_lr", "max_lr")
    return max((float(group[name]) for name in names if group.get(name) is not None), default=0.0)


def _largest_rate(base: Optimizer) -> float:
    return max(map(_told_rate, base.param_groups))


def _inverse_curvature(model: Quadratic) -> float:
    squares = sum(float(g.square().sum()) for g in model.gradient.values())
    curved, square = totals_of(model).sums([bend(model, dict(model.gradient)), squares])
    return square / abs(curved) if curved else 1.0


def norm_of(tensors: Iterable[Tensor | None]) -> float:
    """Of all of them as one vector; of a sharded one, its part that is here."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors if tensor is not None]
    if not local:
        return 0.0
    norms = torch._foreach_norm(local, dtype=torch.float32 if any(map(is_low, local)) else None)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
