"""LLQR: steps in the direction of steepest descent under a divergence, as long as the base's own.

for k = 0, 1, 2, …:
    g_k ← ∇L(θ_k)                                     (the user's backward pass)
    often at first, then rarer:  U ← (H + λ)⁻¹        (a refit: H from the curvature of all examples, averaged)
    Δ, m ← the base's step by g_k, and its momentum
    θ_{k+1} ← θ_k - ‖Δ‖ U m / ‖U m‖                   (tensor by tensor)
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.assignments import assignments
from llqr.base_step import BaseStep
from llqr.checks import check_callable, check_count, refuse_scripted
from llqr.collector import Call, Collector
from llqr.curvature.locations import uncompiled
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import Selector
from llqr.distributed.processes import processes_of, standing, unwrapped
from llqr.divergences import Divergence, resolve
from llqr.errors import LLQRError, LLQRWarning, NonFiniteError, callers_level
from llqr.paper import PaperLLQR
from llqr.saved_state import KEY, Stats, block_state, checked_state_dict
from llqr.second_run import SecondRun
from llqr.statistics import Block, Sums
from llqr.structures.stacks import StructureSpec, assign
from llqr.training_loop import Closure, checked_loss
from llqr.wrapper import (
    LONGEST,
    Every,
    Schedule,
    Stepped,
    Wrapping,
    check_base,
    check_parameters,
    gradients_of,
    not_finite,
    often_at_first,
    stepped_parameters,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SEED = 0x11C9
"""Of the numbers that are drawn in refits; the random streams of the training are left alone."""

LISTENS = "From the next step on calls of the modules inside count too"
CALL_IT = (
    "With a divergence, or a sharded model, it has to be; if your loop calls torch.compile(model), give LLQR that one"
)

MADE_AGAIN = frozenset({"_base_step", "_collector", "_second_run", "_processes"})
"""Attributes that a copy or a pickle leaves out."""


class LLQR(Wrapping):
    """A torch optimizer whose steps go along U m, as far as the base's own: m is its momentum, U a learned inverse curvature.

    Args:
        base: the optimizer that steps, with its own learning rate, momentum and weight decay. Its `param_groups`, `state` and
            `defaults` are this one's too.
        model: the module whose parameters it steps (it may have others, which are left alone). If torch.compile has wrapped it,
            give the wrapper that the loop calls.
        divergence: what a step is measured by. None: the curvature is the second moment of the loss's own gradients, example by
            example, whatever the loss is. "ngd", "gauss-newton", "renyi", "reverse-kl" or an object: gradients are drawn from
            it, in one more run of the model at every refit. "newton" is taken by its Gauss–Newton part, because the inverse of
            a curvature that isn't positive can point uphill.
        structure: of U: "kfac", "ekfac", "diagonal", "scalar", "dense", an object, or a mapping from name patterns to these.
        every: steps between refits, a function of the step's number that tells whether it begins with a refit, or None: often
            at first, then rarer.
        output: picks the tensor that the divergence is about out of what the model returns.
        process_group: the ranks that train this model together. None: the group of the model's DistributedDataParallel or
            `fully_shard`, or else the default group if there is one.

    Matrices of linear layers, convolutions and attention are stepped so, with their biases. All other parameters are stepped by
    the base; `print(optimizer)` tells which and why.
    """

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
        check_base(base, model)
        if isinstance(base, (LLQR, PaperLLQR)):
            raise LLQRError("the base is an LLQR already: wrap the optimizer inside it")
        check_callable("output", output)
        plain = uncompiled(model)
        inside = unwrapped(plain)
        self._wrapped, self._group = plain, process_group
        self.model, self._called = uncompiled(inside), model if inside is plain else inside
        refuse_scripted(self.model)
        self.divergence = None if divergence is None else resolve(divergence)
        self.structure = structure
        self._output = output
        self._schedule = Schedule(often_at_first if every is None else every)
        self._every = every
        self.stats = Stats()
        self.blocks: dict[str, Block] = {}
        """The linear maps by name, each with its curvature (`moments`) and its block of U (`inverse`, whole by `dense()`)."""
        self._by_parts = type(self.model).forward is nn.Module.forward
        """The loop doesn't call the model as a whole, but modules inside, as those of an nn.ModuleList."""
        self._check(base)
        super().__init__(base)

    def _check(self, base: Optimizer) -> None:
        """Raise now for what the first refit would raise for."""
        parameters = stepped_parameters(base, self.model)
        check_parameters(parameters)
        for structure in assign(self.structure, parameters).values():
            structure.check_closed_form()

    def _begin(self) -> None:
        """With the hook on the model, which isn't saved."""
        super()._begin()
        self._processes = processes_of(self._wrapped, self._group)
        self._standing = standing(self.model.parameters())
        self._second_run = SecondRun(self.model, self._called, self.divergence, self._output)
        self._base_step = BaseStep(self.base)
        self._stepped = Stepped(self.base, self.model)
        runs_again = self.divergence is not None or self._processes.sharded
        self._collector = Collector(self._schedule, runs_again)
        self._look_up()
        self._hook()

    def _hook(self) -> None:
        """Listen to the model, or to what is inside."""
        attach = self._collector.attach_to_parts if self._by_parts else self._collector.attach
        self._unhook = weakref.finalize(self, attach(self._called))

    def _listen_to_parts(self) -> None:
        hooked = self._unhook.alive
        self._unhook()
        self._by_parts = True
        if hooked:
            self._hook()

    def _look_up(self) -> dict[str, Tensor]:
        """The parameters that the base steps, as they are now."""
        parameters = self._stepped()
        if self._collector.of is not parameters:
            self._collector.know(parameters, assign(self.structure, parameters))
            self._diagonal = self._second_run.diagonal(parameters)
        return parameters

    def _meet(self, parameters: Mapping[str, Tensor], loads: bool = False) -> None:
        """Processes may have met, and parameters been sharded, since this was made: as where a framework prepares the model.

        `loads`: another U is about to take the place of the one that is there.
        """
        now = standing(parameters.values())
        if now == self._standing:
            return
        processes = processes_of(self._wrapped, self._group)
        if processes.several and self.blocks and not loads:
            raise LLQRError(
                "torch.distributed was initialised, or the model sharded, after U was made or loaded, so ranks may have a U "
                "each: call init_process_group() and fully_shard first, and load_state_dict() after them"
            )
        self._processes, self._standing = processes, now
        self._collector.runs_again |= processes.sharded

    def _together(self) -> AbstractContextManager[None]:
        return self._processes.together()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the base. The new parameters are stepped by the base until the next refit."""
        self.base.add_param_group(param_group)
        try:
            self._check(self.base)
        except LLQRError:
            self.base.param_groups.pop()
            raise
        self._look_up()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._collector.gradients_are_cleared()

    # --- stepping ---

    def step(self, closure: Closure | None = None) -> Any:
        """Refit U if it is time, let the base step, and turn its step to U m."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._look_up()
        self._meet(parameters)
        if self._unhook.alive and self._processes.due(self._schedule):
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
            with no_autocast(parameters), self._processes.refitting(settings, parameters) as whole:
                if closure is not None and self.divergence is not None:
                    checked_loss(loss)
                found = self._second_moments(whole, closure)
                with torch.no_grad():
                    blocks = self._inverted(found)
        except NonFiniteError as error:
            self._reject(str(error))
        else:
            self._take(blocks)
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
        left = collector.other_uses if self._by_parts else {}  # parts are heard before what else uses their weights
        sums = {map_: sums for map_, sums in collector.sums.items() if not left.keys() & set(map_.members)}
        return self._processes.sum_moments(sums, of_means=self.divergence is None)

    def _run_again(self, parameters: Mapping[str, Tensor], calls: Sequence[Call], closure: Closure | None) -> None:
        """All calls with the gradients that the loss sent back to them; gradients are drawn for the last one alone."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        seed = SEED + self._schedule.step + (self._processes.rank << 32)  # ranks draw each for themselves
        generator = torch.Generator(next(iter(trained.values())).device).manual_seed(seed)
        share = 1.0 if self.divergence is None else self._processes.share(self._second_run.examples(calls[-1]))
        ranks = self._processes.size
        self._collector.sums = {}  # of a refit that failed
        with self._collector.paused():
            for call in calls if self.divergence is None else calls[-1:]:
                for map_, sides in self._second_run(trained, call, closure, generator, share, ranks):
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
                known = Block(sums.map, sums.structure)
            diagonal = self._diagonal.get(known.map.weight, 0.0)
            blocks[key] = replace(known, moments=dict(known.moments), diagonal=diagonal)
            blocks[key].take(moments[key])
        self._processes.invert(blocks)
        return blocks

    def _take(self, blocks: dict[str, Block]) -> None:
        self._processes.settle()
        self.blocks |= blocks
        self.stats.refits += 1
        self.stats.memory = sum(block.memory for block in self.blocks.values())

    def _step_along(self, parameters: Mapping[str, Tensor]) -> None:
        """The base's step, turned to U m where there is one."""
        blocks = [
            block
            for block in self.blocks.values()
            if all(name in parameters and parameters[name].grad is not None for name in block.map.members)
            and block.fits(parameters)
        ]
        if not blocks and (
            spoiled := not_finite(gradients_of(parameters))
        ):  # it may be from the start that nothing is finite
            self.stats.nonfinite += len(spoiled)
            self._warn("nonfinite", f"the gradient of {spoiled[0]!r} isn't finite, and the base's own step was taken")
        if left := self._base_step.take(parameters, blocks, self._processes):
            self.stats.nonfinite += len(set(left))
            self._warn(
                "nonfinite", f"U m of {left[0]!r} isn't finite or is zero, and the base's own step was taken there"
            )

    def _reject(self, why: str) -> None:
        self.stats.rejected += 1
        self._warn("rejected", f"a refit was left out, and U stays as it was: {why}")

    def close(self) -> None:
        """Take the hook off the model. U stays as it is from then on."""
        self._unhook()
        self._collector.forget()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The base's, with what LLQR adds under "llqr": tensors and builtins alone. Where `fully_shard` has sharded the model,
        all ranks have to call it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        processes = self._processes
        own = {
            "step": self._schedule.step,
            "blocks": {key: block_state(block) for key, block in processes.gathered(self.blocks).items()},
            "averages": {name: processes.whole(average) for name, average in self._base_step.momentum.averages.items()},
            "stats": asdict(self.stats),
            "by_parts": self._by_parts,
        }
        state: dict[str, Any] = {**self.base.state_dict(), KEY: own}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the other left off; devices and dtypes are those of the parameters here.

        A state of the base alone is taken too, and U begins anew. A state that doesn't fit changes nothing.
        """
        state_dict = checked_state_dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = state_dict.pop(KEY, None)
        parameters = stepped_parameters(self.base, self.model)
        self._meet(parameters, loads=True)
        checked = self._checked_state(own, parameters)
        self.base.load_state_dict(state_dict)
        self._resume(*checked)
        if own is None:
            warnings.warn("the state is of a plain optimizer: U begins anew", LLQRWarning, stacklevel=callers_level())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _resume(
        self, blocks: dict[str, Block], step: int, stats: Stats, averages: dict[str, Tensor], by_parts: bool
    ) -> None:
        """Go on from there, with a base and a model that do."""
        self._processes.settle()
        if by_parts and not self._by_parts:
            self._listen_to_parts()
        self.blocks, self.stats, self._base_step.momentum.averages = blocks, stats, averages
        self.stats.memory = sum(block.memory for block in blocks.values())
        self._schedule.go_to(step)
        self._collector.forget()

    def _checked_state(
        self, own: Any, parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Block], int, Stats, dict[str, Tensor], bool]:
        if own is None:
            return self._processes.blocks({}, {}, {}), 0, Stats(), {}, False
        if not isinstance(own, Mapping) or not {"step", "blocks", "averages", "stats", "by_parts"} <= own.keys():
            known = (
                "of LLQR.paper" if isinstance(own, Mapping) and "preconditioner" in own else "not of LLQR.state_dict()"
            )
            raise LLQRError(f"what the state has under {KEY!r} is {known}: load it into an optimizer of the same kind")
        check_count(f"'step' in the state, under {KEY!r},", own["step"])
        if not all(isinstance(own[part], Mapping) for part in ("blocks", "averages", "stats")):
            raise LLQRError(f"'blocks', 'averages' and 'stats' in the state, under {KEY!r}, are mappings")
        if not isinstance(own["by_parts"], bool):
            raise LLQRError(f"'by_parts' in the state, under {KEY!r}, is True or False")
        stats = Stats.of(own["stats"])
        averages = {}
        for name, average in own["averages"].items():
            real = isinstance(average, Tensor) and average.is_floating_point()
            if not real or name not in parameters or parameters[name].shape != average.shape:
                raise LLQRError(
                    f"the state has a momentum of {name!r} that isn't a tensor, or that the model here has not or in another "
                    "shape"
                )
            averages[name] = self._processes.part(average, parameters[name])
        blocks = self._processes.blocks(own["blocks"], parameters, assign(self.structure, parameters))
        return blocks, own["step"], stats, averages, own["by_parts"]

    def __getstate__(self) -> dict[str, Any]:
        kept = self._pickled(MADE_AGAIN, self._processes.several)
        return {**kept, "averages": self._base_step.momentum.averages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        averages = state.pop("averages")
        self.__dict__.update({**state, "_group": None})
        self._begin()
        self._base_step.momentum.averages = averages

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the curvature and U, of the base's state, and of both; not of what a step works with."""
        own = sum(block.memory for block in self.blocks.values())
        own += sum(average.numel() * average.element_size() for average in self._base_step.momentum.averages.values())
        return self._memory(own)

    def assignments(self) -> dict[str, str]:
        """How each parameter that the base has is stepped, and why."""
        parameters = self._look_up()
        unknown = self._schedule.step == 0 and not self.blocks
        why = "not known before the first step" if unknown else "by the base: in no linear map so far"
        others = {} if unknown else self._collector.other_uses
        return assignments(parameters, self.blocks.values(), others, dict.fromkeys(parameters, why))

    def __repr__(self) -> str:
        how = "the second moments of the loss's own gradients" if self.divergence is None else repr(self.divergence)
        every = f"often at first, then every {LONGEST} steps" if self._every is None else repr(self._every)
        lines = [f"curvature: {how}", f"structure={self.structure!r}, every={every}"]
        lines += [f"{name}: {what}" for name, what in self.assignments().items()]
        lines += [
            f"at step {self._schedule.step}: {self.stats.in_words()}",
            "base=" + repr(self.base).replace("\n", "\n  "),
        ]
        return "LLQR(\n  " + "\n  ".join(lines) + "\n)"

    paper = PaperLLQR
    """Algorithm 1 of the paper, with its hyperparameters: `LLQR.paper(base, model, divergence="ngd", structure="ekfac")`."""
