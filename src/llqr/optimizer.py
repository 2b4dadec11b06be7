"""LLQR: steps in the direction of steepest descent under a divergence, as long as the base's own.

for k = 0, 1, 2, …:
    g_k ← ∇L(θ_k)                                     (the user's backward pass)
    often at first, then rarer:  U ← (H + λ)⁻¹        (a refit: H from the curvature of all examples, averaged)
    Δ, m ← the base's step by g_k, and its momentum, as Nesterov's step has it
    θ_{k+1} ← θ_k - ‖Δ‖ U m / ‖U m‖                   (tensor by tensor)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.base_step import BaseStep
from llqr.checks import check_amount, check_callable
from llqr.closures import Closure, checked_loss, evaluated
from llqr.curvature.collector import Call, Collector
from llqr.curvature.linear_maps import Block
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import Selector
from llqr.curvature.second_run import SecondRun
from llqr.curvature.statistics import UNLIKE_USES, Sums
from llqr.divergences import Divergence, resolve
from llqr.errors import LLQRError, NonFiniteError, unknown
from llqr.paper import PaperLLQR
from llqr.reporting import assignments
from llqr.structures.stacks import StructureSpec, assign
from llqr.wrapper import KEY, LONGEST, Every, Wrapping, gradients_of, not_finite, often_at_first, stepped_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LISTENS = "From the next step on calls of the modules inside count too"
CALL_IT = (
    "With a divergence, or a sharded model, it has to be; if your loop calls torch.compile(model), give LLQR that one"
)


class LLQR(Wrapping):
    """A torch optimizer whose steps have the direction U m and the length of the base's own step.

    m is the base's momentum, in which the present gradient counts once more, U the inverse curvature; a refit updates U.
    Matrices of linear layers, convolutions and attention are stepped so, with their biases. The base steps all other
    parameters; `print(optimizer)` says which and why.

    Args:
        base: the optimizer inside, with its own learning rate, momentum and weight decay. It shares its `param_groups`, `state`
            and `defaults` with this one.
        model: the module whose parameters it steps (other parameters of the module are left alone). If torch.compile has
            wrapped it, give the compiled model that the loop calls.
        divergence: the divergence whose second derivative is the curvature. None: the second moment of the loss's own
            gradients, example by example, for any loss. "ngd", "gauss-newton", "renyi", "reverse-kl" or an object: the model
            runs once more at every refit, with gradients drawn from the divergence. "newton" is replaced by Gauss–Newton,
            because an indefinite curvature can point uphill.
        structure: of U: "kfac", "ekfac", "diagonal", "scalar", "dense", an object, or a mapping from name patterns to these.
        every: steps between refits, or a function of the step's number that says whether to refit. None: often at first, later
            every 40 steps.
        output: from what the model returns, picks the tensor that the divergence is about.
        process_group: the ranks that train this model together. None: the group of the model's DistributedDataParallel or
            `fully_shard`, or else the default group if there is one.
    """

    kind = "LLQR"
    saved: ClassVar[dict[str, Any]] = {"blocks": {}, "averages": {}, "lengths": {}, "by_parts": False}
    made_again = frozenset({"_base_step", "_collector", "_second_run"})

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        divergence: str | Divergence | None = None,
        structure: StructureSpec = "kfac",
        every: Every | None = None,
        *,
        output: Selector | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(base, model, often_at_first if every is None else every, process_group)
        check_callable("output", output)
        if output is not None and divergence is None:
            raise LLQRError(
                "output= picks the tensor that a divergence is about, and there is none: leave it out, or name a divergence"
            )
        self.divergence = None if divergence is None else resolve(divergence)
        self.structure = structure
        self._output = output
        self.blocks: dict[str, Block] = {}
        """The linear maps by name, each with its curvature (`moments`) and its block of U (`inverse`, whole by `dense()`)."""
        self._averages: dict[str, Tensor] = {}
        """Momenta, around a base that doesn't show its own."""
        self._lengths: dict[str, list[float]] = {}
        """Of the steps so far, as `Lengths` has them."""
        self._by_parts = type(self.model).forward is nn.Module.forward
        """The loop doesn't call the model as a whole, but modules inside, as those of an nn.ModuleList."""
        self._check(stepped_parameters(base, self.model))
        self._begin()

    def _check(self, parameters: dict[str, Tensor]) -> None:
        super()._check(parameters)
        for structure in assign(self.structure, parameters).values():
            structure.check_closed_form()

    def _begin(self) -> None:
        super()._begin()
        self._second_run = SecondRun(self.model, self._called, self.divergence, self._output)
        self._base_step = BaseStep(self.base, self._averages, self._lengths)
        self._collector = Collector(self._schedule, self.divergence is not None or self.processes.sharded)
        self._meet()
        self._hook()

    def _hook(self) -> None:
        """Listen to the model, or to what is inside."""
        self._collector.parts = self._by_parts
        self._listen(self._collector.attach, self._collector.forget)

    def _listen_to_parts(self) -> None:
        hooked = self._unhook.alive
        self._unhook()
        self._by_parts = True
        if hooked:
            self._hook()

    def _meet(self, loads: bool = False) -> dict[str, Tensor]:
        parameters = super()._meet(loads)
        self._collector.runs_again |= self.processes.sharded
        if self._collector.of is not parameters:
            self._collector.know(parameters, assign(self.structure, parameters))
            self._diagonal = self._second_run.diagonal(parameters)
        return parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._collector.gradients_are_cleared()

    # --- stepping ---

    def step(self, closure: Closure | None = None) -> Any:
        """Refit U if it is due, let the base step, and give its step the direction U m."""
        loss = None if closure is None else evaluated(closure)
        parameters = self._meet()
        if self._unhook.alive and self.processes.due(self._schedule):
            self._refit(parameters, closure, loss)
        self._collector.forget()
        with torch.no_grad(), no_autocast(parameters):
            self._step_along(parameters)
        self._schedule.go_to(self._schedule.step + 1)
        return loss

    def _refit(self, parameters: Mapping[str, Tensor], closure: Closure | None, loss: Any) -> None:
        begun = time.perf_counter()
        settings = (self._schedule.step, self.structure, self.divergence)
        try:
            with no_autocast(parameters), self.processes.refitting(settings, parameters) as whole:
                if closure is not None and self.divergence is not None:
                    checked_loss(loss)
                found = self._second_moments(whole, closure)
                with torch.no_grad():
                    blocks = self._inverted(found)
        except NonFiniteError as error:
            self._reject(str(error))
        else:
            for key in blocks.keys() & self.blocks.keys():
                self.blocks[key].stack = None  # a stack and its blocks hold each other
            self.blocks |= blocks
            self.stats.refits += 1
            self.stats.memory = self._memory()
        finally:
            self.stats.seconds += time.perf_counter() - begun

    def _second_moments(self, parameters: Mapping[str, Tensor], closure: Closure | None) -> dict[str, Sums]:
        """Of each linear map, since the last step, by all processes."""
        collector = self._collector
        if self.divergence is not None:
            self._second_run.check_step(closure)
        if collector.calls and (collector.runs_again or not collector.sums):
            self._run_again(parameters, collector.calls, closure)
        if not collector.was_called:
            if not (self._by_parts or collector.runs_again):
                self._listen_to_parts()
            raise NonFiniteError(
                "no gradient has come back through the model: it wasn't called as model(...) with gradients on since the last "
                "step. " + (LISTENS if self._by_parts and not collector.runs_again else CALL_IT)
            )
        if collector.heard_nothing:
            raise NonFiniteError(
                "no gradient has come back through the model since it was called: backward() comes first"
            )
        # parts are heard one by one, before what else uses their weights
        used_otherwise = collector.other_uses.keys() if self._by_parts else set()
        sums = [sums for sums in collector.sums.values() if used_otherwise.isdisjoint(sums.map.members)]
        found = self.processes.sum_moments(sums, self.divergence is None, self.blocks)
        unlike = {s.map.weight for s in sums} - {s.map.weight for s in found.values()}
        collector.other_uses = {**collector.other_uses, **dict.fromkeys(unlike, UNLIKE_USES)}
        return found

    def _run_again(self, parameters: Mapping[str, Tensor], calls: Sequence[Call], closure: Closure | None) -> None:
        """All calls with the gradients that the loss sent back to them; gradients are drawn for the last one alone."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._collector.sums = {}  # of a refit that failed
        with self._collector.listening(False):
            for call in calls if self.divergence is None else calls[-1:]:
                for map_, sides in self._second_run(trained, call, closure, self._schedule.step, self.processes):
                    self._collector.add(map_, sides)
        self._collector.other_uses = self._second_run.other_uses

    def _inverted(self, found: Mapping[str, Sums]) -> dict[str, Block]:
        """New blocks, with what was found averaged in; the ones that are used stay as they are."""
        seen = {key: sums for key, sums in found.items() if sums.places}  # an expert may have met no example
        if found and not seen:
            raise NonFiniteError("the batch is empty")
        moments = {key: sums.moments() for key, sums in seen.items()}
        wrong = [key for key, parts in moments.items() if not all(bool(m.sum().isfinite()) for m in parts.values())]
        if wrong:
            raise NonFiniteError(f"the gradients or inputs of {wrong[0]!r} aren't finite")
        blocks = {}
        for key, sums in seen.items():
            known = self.blocks.get(key)
            bias = None if known is None else known.map.bias
            if bias is not None and sums.map.bias is None and not self._collector.of[bias].requires_grad:
                known = None  # frozen since
            if known is None or not known.takes(sums.map, moments[key]) or known.structure != sums.structure:
                known = Block(sums.map, sums.structure, owner=sums.owner)
            diagonal = self._diagonal.get(known.map.weight, 0.0)
            blocks[key] = replace(known, moments=dict(known.moments), diagonal=diagonal)
            blocks[key].take(moments[key])
        self.processes.invert(blocks)
        return blocks

    def _step_along(self, parameters: Mapping[str, Tensor]) -> None:
        """The base's step, turned to U m where there is one."""
        gradients = gradients_of(parameters)
        blocks = [b for b in self.blocks.values() if gradients.keys() >= set(b.map.members) and b.fits(parameters)]
        if not blocks:  # it may be from the start that nothing is finite
            self._left_to_base(
                not_finite(gradients), "the gradient of {} isn't finite, and the base's own step was taken"
            )
        left = self._base_step.take(parameters, gradients, blocks, self.processes)
        self._left_to_base(
            left, "U m of {} isn't finite, is zero or isn't known, and the base's own step was taken there"
        )

    # --- state ---

    def _learned(self, gathered: bool) -> dict[str, Any]:
        blocks, averages = self.blocks, self._averages
        if gathered:
            blocks, averages = dict(self.processes.gathered(blocks)), self.processes.whole(averages)
        return {
            "blocks": {key: block.state() for key, block in blocks.items()},
            "averages": {name: average.clone() for name, average in averages.items()},
            "lengths": {name: list(sums) for name, sums in self._lengths.items()},
            "by_parts": self._by_parts,
        }

    def _checked(self, own: Mapping[str, Any], parameters: dict[str, Tensor]) -> Callable[[], None]:
        if not all(isinstance(own[part], Mapping) for part in ("blocks", "averages", "lengths")):
            raise LLQRError(f"'blocks', 'averages' and 'lengths' in the state, under {KEY!r}, are mappings")
        if not isinstance(own["by_parts"], bool):
            raise LLQRError(f"'by_parts' in the state, under {KEY!r}, is True or False")
        averages = {}
        for name, average in own["averages"].items():
            real = isinstance(average, Tensor) and average.is_floating_point()
            if not real or name not in parameters or parameters[name].shape != average.shape:
                raise LLQRError(
                    f"the state has a momentum of {name!r} that doesn't fit: no tensor, or in no such shape here"
                )
            like = parameters[name]
            averages[name] = self.processes.part(average.to(like.device, like.dtype, copy=True), like)
        lengths = {}
        for name, sums in own["lengths"].items():
            if name not in parameters:
                raise unknown("parameter in the state's 'lengths'", name, parameters)
            if not isinstance(sums, (list, tuple)) or len(sums) != 2:
                raise LLQRError(f"'lengths' in the state, under {KEY!r}, has two numbers for {name!r}")
            for number in sums:
                check_amount(f"a length of {name!r} in the state", number)
            if not all(sums):
                raise LLQRError(f"'lengths' in the state, under {KEY!r}, has a zero for {name!r}")
            lengths[name] = [float(number) for number in sums]
        structures = assign(self.structure, parameters)
        blocks = {key: Block.from_state(key, one, parameters, structures) for key, one in own["blocks"].items()}
        self.processes.hold(blocks)

        def take_over() -> None:
            if own["by_parts"] and not self._by_parts:
                self._listen_to_parts()
            self.blocks, self._averages, self._lengths = blocks, averages, lengths
            self._base_step.momentum.averages, self._base_step.lengths.known = averages, lengths

        return take_over

    def _memory(self) -> int:
        return sum(block.memory for block in self.blocks.values())

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the curvature and U (with momenta of our own, if any), of the base's state, and of both."""
        averages = sum(a.numel() * a.element_size() for a in self._averages.values())
        return {key: held + averages * (key != "base") for key, held in super().memory_usage().items()}

    def assignments(self) -> dict[str, str]:
        """How each parameter that the base has is stepped, and why."""
        parameters = self._meet()
        unknown = self._schedule.step == 0 and not self.blocks
        why = "not known before the first step" if unknown else "by the base: in no linear map so far"
        others = {} if unknown else self._collector.other_uses
        return assignments(parameters, self.blocks.values(), others, why)

    def __repr__(self) -> str:
        how = "the second moments of the loss's own gradients" if self.divergence is None else repr(self.divergence)
        usual = self._schedule.every is often_at_first
        every = f"often at first, then every {LONGEST} steps" if usual else repr(self._schedule.every)
        told = [f"{name}: {what}" for name, what in self.assignments().items()]
        return self._shown(f"curvature: {how}", f"structure={self.structure!r}, every={every}", *told)

    paper = PaperLLQR
    """Algorithm 1 of the paper, with its hyperparameters: `LLQR.paper(base, model, divergence="ngd", structure="ekfac")`."""
