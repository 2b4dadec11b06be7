"""PaperLLQR: Algorithm 1 of the paper, as a wrapper around any torch optimizer.

U ← I
for k = 0, 1, 2, …:
    g_k ← ∇L(θ_k)                                  (the user's backward pass)
    if k mod n = 0:  U ← β U + (1 - β) fit(J)      (a refit; J is the relaxed objective at θ_k)
    θ_{k+1} ← base(θ_k, U g_k)

`LLQR.paper` is this class; its defaults are the paper's hyperparameters.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss, check_callable, check_flag
from llqr.curvature.locations import PerLayer, uncompiled
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import Selector, Streams
from llqr.distributed.block_owners import BlockOwners, OneProcess
from llqr.distributed.processes import standing, training_ranks_of, unwrapped
from llqr.divergences import Divergence, resolve
from llqr.errors import LLQRError, LLQRWarning, NonFiniteError, callers_level
from llqr.preconditioner import Preconditioner
from llqr.refit import Batch, Blocks, Refit, Source, checked_batch, checked_ema, trainable
from llqr.saved_state import KEY, State, Stats, checked_state_dict
from llqr.solvers import SGDM, Quadratic, Solver
from llqr.structures.stacks import StructureSpec
from llqr.training_loop import Closure, InputHook, checked_loss, evaluated, evaluated_gradients
from llqr.wrapper import (
    Every,
    Schedule,
    Stepped,
    Wrapping,
    check_base,
    gradients_of,
    not_finite,
    replaced,
    stepped_parameters,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SOLVER = SGDM(lr=0.005, momentum=0.9, clip=5.0)
"""The paper's inner solver."""


class PaperLLQR(Wrapping):
    """A torch optimizer whose gradients are preconditioned by an inverse curvature U that is fitted along one of them.

    A refit's gradient and its curvature are of one network. Where it knows the loss (`step(closure)`, or `loss_fn` with
    `refit_batch`) that is the paper's, with running BatchNorm statistics and without dropout; `step()` alone leaves the network
    as the step had it, and draws the same dropout masks.

    Args:
        base: the optimizer that steps, with its own learning rate, momentum and weight decay. Its `param_groups`, `state` and
            `defaults` are this one's too.
        model: the module whose parameters it steps (it may have others, which are left alone). Where torch.compile has wrapped
            it, the wrapper that the loop calls; the names of parameters are those without it.
        divergence: what a step is measured by: "ngd", "newton", "gauss-newton", "renyi", "reverse-kl", or an object. "ngd" is
            the paper's, `KL(reduction="sum")`: a sum over the batch, where the loss is a mean. The names "renyi" and
            "reverse-kl" are sums, too.
        structure: of U: "scalar", "diagonal", "kfac", "ekfac", "dense", an object, or a mapping from name patterns to these.
        every: steps between refits, or a function of the step's number that tells whether it begins with a refit.
        steps: inner steps of a refit.
        solver: the inner solver; None is the paper's, `SGDM(lr=0.005, momentum=0.9, clip=5.0)`.
        ema: β; None is the paper's, 0.95, and 0.9 for divergences that aren't flat (Newton).
        damping: added to the curvature's diagonal, as for `QuadraticModel`.
        chunk_size: examples at a time in a refit.
        segments: modules that a refit runs again in place of keeping what they compute, as for `QuadraticModel`.
        warm_start: begin a fit at the U that is there, in place of the identity.
        loss_fn: `loss_fn(output, targets)`, for refits on a batch of their own.
        output: picks the tensor that the divergence is about out of what the model returns.
        weights: from the inputs of a refit to one weight a variable, 0 for padding.
        refit_batch: returns `(inputs, targets)` for a refit, in place of the batch of the step. Without a `loss_fn`, the
            gradient stays that of the step, and the random numbers of the curvature are those that the step drew: the masks are
            the same where the batch has the same shape.
        shared: the inputs that `chunk_size` and `sample` don't cut, as for `QuadraticModel`.
        sample: the share of the step's examples whose curvature a refit looks at; the gradient is that of all of them. With
            0.25 a refit costs little more than a quarter. For divergences that are means, as `KL()`.
        process_group: the ranks that train this model together, each on its own batches; a refit is about all of them. None:
            the group of the model's DistributedDataParallel or `fully_shard`, or else the default group if there is one. (To
            train apart from the others give a group of one.)
        shard: each rank holds its own blocks of U, and steps exchange U g; all ranks have to call `state_dict()` then. None:
            with `fully_shard` only (docs/processes.md says why).
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        divergence: str | Divergence = "ngd",
        structure: StructureSpec = "ekfac",
        every: Every = 500,
        *,
        steps: int = 25,
        solver: Solver | None = None,
        ema: float | None = None,
        damping: PerLayer = 0.0,
        chunk_size: int | None = None,
        segments: Collection[str] = (),
        warm_start: bool = False,
        loss_fn: Loss | None = None,
        output: Selector | None = None,
        weights: Callable[[Inputs], Tensor] | None = None,
        refit_batch: Callable[[], Batch] | None = None,
        shared: Collection[str | int] = (),
        sample: float = 1.0,
        process_group: ProcessGroup | None = None,
        shard: bool | None = None,
    ) -> None:
        check_base(base, model, "LLQR.paper")
        if isinstance(base, Wrapping):
            raise LLQRError("the base is an LLQR already: wrap the optimizer inside it")
        plain = uncompiled(model)
        inside = unwrapped(plain)
        self.ranks: OneProcess = training_ranks_of(plain, process_group, shard) or OneProcess()
        """Those that train this model together."""
        self._group, self._shard, self._standing = process_group, shard, standing(inside.parameters())
        self.model, self._called = uncompiled(inside), model if inside is plain else inside
        parameters = stepped_parameters(base, self.model)
        kind = resolve(divergence, reduction="sum")
        self.ema = checked_ema((0.95 if kind.flat else 0.9) if ema is None else ema)
        check_callable("refit_batch", refit_batch)
        check_flag("warm_start", warm_start)
        self.warm_start, self.refit_batch = warm_start, refit_batch
        self._refit = Refit(
            self.model,
            self._called,
            kind,
            Blocks(structure),
            SOLVER if solver is None else solver,
            steps,
            damping,
            chunk_size,
            loss_fn,
            output,
            weights,
            shared,
            sample,
            segments,
        )
        if refit_batch is not None and self._refit.sample < 1:
            raise LLQRError("refit_batch says which examples a refit looks at: leave out sample")
        self._refit.check(parameters)
        self.divergence, self.structure, self.solver, self.steps = kind, structure, self._refit.solver, steps
        self.preconditioner: Preconditioner | None = None
        """U; None is the identity, until the first refit. With `shard`, the blocks of this rank."""
        self._owners: BlockOwners | None = None
        self.stats = Stats()
        self._schedule = Schedule(every)
        super().__init__(base)

    def _begin(self) -> None:
        """With the hook on the model, which isn't saved either."""
        super()._begin()
        self._stepped = Stepped(self.base, self.model)
        own_loss = self.refit_batch is not None and self._refit.loss_fn is not None
        self._hook = InputHook(None if own_loss else self._schedule, inputs=self.refit_batch is None)
        self._unhook = weakref.finalize(self, self._hook.attach(self._called))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the base. U is the identity for the new parameters until the next refit."""
        self.base.add_param_group(param_group)
        try:
            self._refit.check(stepped_parameters(self.base, self.model))
        except LLQRError:
            self.base.param_groups.pop()
            raise

    def _meet(self, parameters: Mapping[str, Tensor], loads: bool = False) -> None:
        """Ranks may have met, and parameters been sharded, since this was made: as where a framework prepares the model.

        `loads`: another U is about to take the place of the one that is there.
        """
        now = standing(parameters.values())
        if now == self._standing:
            return
        ranks = training_ranks_of(self.model, self._group, self._shard) or OneProcess()
        if ranks.several and self.preconditioner is not None and not loads:
            raise LLQRError(
                "torch.distributed was initialised, or the model sharded, after U was fitted or loaded, so ranks may have a U "
                "each: call init_process_group() and fully_shard first, and load_state_dict() after them"
            )
        self.ranks, self._standing = ranks, now

    def _together(self) -> AbstractContextManager[None]:
        return self.ranks.together()

    # --- stepping ---

    def step(self, closure: Closure | None = None) -> Any:
        """Refit U if it is time, then step the base with U g in place of the gradients g.

        With divergences that need no loss (KL, Rényi), the gradients that are there and the model's last inputs are enough.
        The others take a closure that clears the gradients, evaluates the loss, takes it backward and returns it. Where U
        is refitted, it is evaluated once more with the modules in evaluation mode, and for curvature products of the loss (with
        Gauss–Newton once for each); it has to give the same each time.
        """
        streams = Streams(self.model) if closure is not None and self._schedule.may_be_due() else None
        loss = None if closure is None else evaluated(closure)
        parameters = self._stepped()
        self._meet(parameters)
        gradients = gradients_of(parameters)
        if self.ranks.due(self._schedule):
            with self._together():
                if closure is not None:
                    checked_loss(loss)
                self._refit_on(parameters, self._source(parameters, closure, streams, self._own_batch()))
        self._hook.forget()
        with replaced(parameters, self._preconditioned(parameters, gradients)):
            self.base.step()
        self._schedule.go_to(self._schedule.step + 1)
        return loss

    def refit(
        self,
        inputs: Inputs | None = None,
        targets: Any = None,
        loss_fn: Loss | None = None,
        closure: Closure | None = None,
    ) -> bool:
        """Refit U now: on a batch (by default what `refit_batch` returns), or on what a closure evaluates.

        The gradient of J is that of the loss on this batch where a loss is given, that which the closure leaves, or else the
        `.grad` that is there. Returns whether the new U was taken; if it wasn't finite, the one from before stays.
        """
        if closure is not None and inputs is not None:
            raise LLQRError("refit takes a batch or a closure, not both")
        if targets is not None and loss_fn is None and self._refit.loss_fn is None:
            raise LLQRError("refit was given targets and no loss: give loss_fn too, here or to LLQR.paper")
        parameters = stepped_parameters(self.base, self.model)
        self._meet(parameters)
        with self._together():
            batch = (inputs, targets) if inputs is not None else self._own_batch() if closure is None else None
            streams = None if closure is None else Streams(self.model)
            with self._hook.listening(closure is not None):
                if closure is not None:
                    checked_loss(evaluated(closure))
                source = self._source(parameters, closure, streams, batch, loss_fn)
            return self._refit_on(parameters, source)

    def objective(self, inputs: Inputs, targets: Any = None, loss_fn: Loss | None = None) -> Quadratic:
        """The quadratic model that a refit on this batch would fit U to; nothing is changed by it."""
        parameters = stepped_parameters(self.base, self.model)
        known = (loss_fn or self._refit.loss_fn) is not None
        source = Source(gradients_of(parameters), batch=(inputs, targets), loss_fn=loss_fn, evaluated=known)
        with self._hook.listening(False), no_autocast(parameters):
            return self._refit.objective(parameters, source)

    def _source(
        self,
        parameters: Mapping[str, Tensor],
        closure: Closure | None,
        streams: Streams | None,
        batch: Batch | None,
        loss_fn: Loss | None = None,
    ) -> Source:
        """What a refit is about. `streams` are as they were before the closure was evaluated."""
        seen = self._hook.inputs(self.model) if batch is None else None
        if count := self._refit.check_family(self._hook.slopes):
            self._warn(
                "sum",
                f"the loss adds up its {count} variables, and LLQR.paper expects their mean, as in the paper: steps are about "
                f'{count} times as long. Write reduction="mean" in the loss, or divide the learning rate by {count}',
            )
        known = batch is not None and (loss_fn or self._refit.loss_fn) is not None
        called = None if known else self._hook.called
        if closure is None or streams is None or known:
            return Source(gradients_of(parameters), seen, closure, batch, loss_fn, called, streams, evaluated=known)
        with self._hook.listening(False):
            gradients = self._evaluated(closure, parameters, streams)
        if gradients is None:
            self._warn(
                "evaluated",
                "a refit's gradient and curvature are of the network in training, because the closure puts modules into "
                "training mode: call model.train() outside of it",
            )
        own = gradients or gradients_of(parameters)  # it may take nothing backward
        return Source(own, seen, closure, batch, loss_fn, called, streams, evaluated=bool(gradients))

    def _evaluated(
        self, closure: Closure, parameters: Mapping[str, Tensor], streams: Streams
    ) -> dict[str, Tensor] | None:
        try:
            return evaluated_gradients(closure, self.model, parameters, streams)
        except Exception as error:
            if self.ranks.several:
                raise  # the others may be waiting in their backward passes
            self._warn(
                "evaluated",
                "a refit's gradient and curvature are of the network in training, because the closure doesn't run with the "
                f"modules in evaluation mode: {type(error).__name__}: {error}",
            )
            return None

    def _own_batch(self) -> Batch | None:
        return None if self.refit_batch is None else checked_batch(self.refit_batch())

    def _refit_on(self, parameters: Mapping[str, Tensor], source: Source) -> bool:
        begun, blocks = time.perf_counter(), self._refit.blocks
        try:
            with self._hook.listening(False), no_autocast(parameters), self.ranks.refitting():
                names, source = self._dealt(parameters, source)
                used = blocks.current(parameters, names, self.preconditioner)
                start = used if self.warm_start else None
                u, fault = self._refit(parameters, source, start)
                if fault is None:
                    new = used.blend(u, self.ema)
                    new = new if source.owners is None else source.owners.kept(new)
        except NonFiniteError as error:
            return self._reject(str(error))
        finally:
            self.stats.seconds += time.perf_counter() - begun
        if u.history:
            self.stats.objective_before, self.stats.objective_after = u.history[0], u.history[-1]
        if fault is not None:
            return self._reject(fault)
        self.preconditioner, self._owners = new, source.owners
        self.stats.refits += 1
        self.stats.memory = self.preconditioner.memory
        return True

    def _dealt(self, parameters: Mapping[str, Tensor], source: Source) -> tuple[list[str], Source]:
        """The parameters whose blocks are fitted here, and what there is to fit them on."""
        names = trainable(parameters)
        if not self.ranks.several:
            return names, source
        layout, known = self._refit.blocks.layout(parameters, names), self.preconditioner is not None
        self.ranks.agree(layout, (self._schedule.step, self.ema, self.warm_start, known, *self._refit.settings()))
        owners = self.ranks.owners_of(layout, self._owners)
        gradients = self.ranks.at_owners(owners, parameters, source.gradients)
        return names if owners is None else owners.own(), replace(source, gradients=gradients, owners=owners)

    def _preconditioned(
        self, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> Mapping[str, Tensor | None]:
        if self.preconditioner is None:
            self._count_not_finite(not_finite(gradients))
            return {}
        with torch.no_grad(), no_autocast(gradients):
            found = self.ranks.precondition(self._owners, self.preconditioner, parameters, gradients)
        self._count_not_finite(found.nonfinite)
        return found.gradients

    def _count_not_finite(self, names: Sequence[str]) -> None:
        if names:
            self.stats.nonfinite += len(names)
            self._warn(
                "nonfinite", f"the gradient of {names[0]!r} is not finite, or not U times it: the base gets it as it is"
            )

    def _reject(self, why: str) -> bool:
        self.stats.rejected += 1
        self._warn("rejected", f"a refit was rejected, and U stays as it was: {why}")
        return False

    def close(self) -> None:
        """Take the hook off the model. U stays and is applied; refits need a batch or a closure from then on."""
        self._unhook()
        self._hook.forget()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The base's, with what LLQR adds under "llqr": tensors and builtins alone.

        All of U is in it, also where each rank holds its own blocks (`shard`): then every rank has to call this, also those
        that throw it away.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        u = self.preconditioner
        if u is not None and self._owners is not None:
            u = self._owners.whole(u)
        own = State.of(self._schedule.step, u, self.stats)
        state: dict[str, Any] = {**self.base.state_dict(), KEY: own.as_dict()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the other left off; devices and dtypes are those of the parameters here.

        A state of the base alone is taken too, and U begins at the identity. A state that doesn't fit changes nothing.
        """
        state_dict = checked_state_dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        plain = KEY not in state_dict
        own = State(0, None, Stats()) if plain else State.from_dict(state_dict.pop(KEY))
        u, owners = None, None
        parameters = stepped_parameters(self.base, self.model)
        self._meet(parameters, loads=True)
        if own.preconditioner is not None:
            u, owners = self._refit.blocks.blank(parameters, own.preconditioner["blocks"], self.ranks)
            u.load_state_dict(own.preconditioner if owners is None else owners.part(own.preconditioner))
        self.base.load_state_dict(state_dict)
        self._resume(own, u, owners)
        if plain:
            warnings.warn(
                "the state is of a plain optimizer: U begins at the identity", LLQRWarning, stacklevel=callers_level()
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _resume(self, own: State, u: Preconditioner | None, owners: BlockOwners | None) -> None:
        """Go on from there."""
        self.preconditioner, self._owners, self.stats = u, owners, own.stats
        self.stats.memory = 0 if u is None else u.memory
        self._schedule.go_to(own.step)
        self._hook.forget()

    def __getstate__(self) -> dict[str, Any]:
        return self._pickled(frozenset({"_hook"}), self.ranks.several)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_group": None})
        self._begin()

    def memory_usage(self) -> dict[str, int]:
        """Bytes of U, of the base's state, and of both; not of what a step works with."""
        return self._memory(0 if self.preconditioner is None else self.preconditioner.memory)

    def __repr__(self) -> str:
        own = [
            f"every={self._schedule.every!r}, ema={self.ema:g}, warm_start={self.warm_start}",
            *self._refit.described(),
        ]
        done = f"at step {self._schedule.step}: {self.stats.in_words()}"
        base = repr(self.base).replace("\n", "\n  ")
        return "LLQR.paper(\n  " + ",\n  ".join([*own, done, f"base={base}"]) + "\n)"
