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
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llqr.checks import Inputs, Loss, check_callable, check_flag, checked_number
from llqr.closures import Closure, checked_loss, evaluated, evaluated_gradients
from llqr.curvature.collector import InputHook
from llqr.curvature.locations import PerLayer
from llqr.curvature.precision import no_autocast
from llqr.curvature.recorder import Selector, Streams
from llqr.divergences import Divergence, resolve
from llqr.errors import LLQRError, NonFiniteError
from llqr.preconditioner import Preconditioner
from llqr.refit import Batch, Refit, Source, check_fit, checked_batch
from llqr.solvers import SGDM, Quadratic, Solver
from llqr.structures.stacks import StructureSpec
from llqr.wrapper import Every, Wrapping, gradients_of, not_finite, replaced, stepped_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SOLVER = SGDM(lr=0.005, momentum=0.9, clip=5.0)
"""The paper's inner solver."""


class PaperLLQR(Wrapping):
    """The paper's algorithm: a torch optimizer whose base steps by U g, with an inverse curvature U fitted to one gradient.

    A refit takes gradient and curvature of the same network. If it knows the loss (`step(closure)`, or `loss_fn` with
    `refit_batch`) it uses evaluation mode, as the paper does: running BatchNorm statistics, no dropout. With `step()` alone it
    uses the network as the step did, with the same dropout masks.

    Args:
        base: the optimizer inside, with its own learning rate, momentum and weight decay. It shares its `param_groups`, `state`
            and `defaults` with this one.
        model: the module whose parameters it steps (other parameters of the module are left alone). If torch.compile has
            wrapped it, give the compiled model that the loop calls; parameters keep their names.
        divergence: "ngd", "newton", "gauss-newton", "renyi", "reverse-kl", or an object; its second derivative is the
            curvature. "ngd" is the paper's, `KL(reduction="sum")`: a sum over the batch, where the loss is a mean. The names
            "renyi" and "reverse-kl" are sums, too.
        structure: of U: "scalar", "diagonal", "kfac", "ekfac", "dense", an object, or a mapping from name patterns to these.
        every: steps between refits, or a function of the step's number that says whether to refit.
        steps: inner steps of a refit.
        solver: the inner solver; None is the paper's, `SGDM(lr=0.005, momentum=0.9, clip=5.0)`.
        ema: β of the average of U; None is the paper's, 0.95, and 0.9 for divergences that aren't flat (Newton).
        damping: added to the curvature's diagonal, as for `QuadraticModel`.
        chunk_size: examples at a time in a refit.
        segments: modules that a refit runs again, to save memory, as for `QuadraticModel`.
        warm_start: start a fit at the present U instead of the identity.
        loss_fn: `loss_fn(output, targets)`, for refits on a batch of their own.
        output: from what the model returns, picks the tensor that the divergence is about.
        weights: from the inputs of a refit to one weight per example or token, 0 for padding.
        refit_batch: returns `(inputs, targets)` for a refit, instead of the batch of the step. Without a `loss_fn`, the
            gradient is that of the step, and the curvature has the step's random state: the same dropout masks if the batch has
            the same shape.
        shared: the inputs that `chunk_size` doesn't split, as for `QuadraticModel`.
        process_group: the ranks that train this model together, each on its own batches; a refit uses all of them. None:
            the group of the model's DistributedDataParallel or `fully_shard`, or else the default group if there is one. (To
            train separately from the others give a group of one.)
    """

    kind = "LLQR.paper"
    saved: ClassVar[dict[str, Any]] = {"preconditioner": None}
    made_again = frozenset({"_hook"})

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
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(base, model, every, process_group)
        kind = resolve(divergence, reduction="sum")
        ema = (0.95 if kind.flat else 0.9) if ema is None else ema
        self.ema = checked_number("ema", ema, lambda b: 0 <= b < 1, "at least 0 (U is the last fit) and below 1")
        check_callable("refit_batch", refit_batch)
        check_flag("warm_start", warm_start)
        self.warm_start, self.refit_batch = warm_start, refit_batch
        self._refit = Refit(
            self.model,
            self._called,
            kind,
            structure,
            SOLVER if solver is None else solver,
            steps,
            damping,
            chunk_size,
            loss_fn,
            output,
            weights,
            shared,
            segments,
        )
        self._check(stepped_parameters(base, self.model))
        self.divergence, self.structure, self.solver, self.steps = kind, structure, self._refit.solver, steps
        self.preconditioner: Preconditioner | None = None
        """U; None is the identity, until the first refit."""
        self._begin()

    def _check(self, parameters: dict[str, Tensor]) -> None:
        super()._check(parameters)
        self._refit.check(parameters)

    def _begin(self) -> None:
        super()._begin()
        own_loss = self.refit_batch is not None and self._refit.loss_fn is not None
        self._hook = InputHook(None if own_loss else self._schedule, inputs=self.refit_batch is None)
        self._listen(self._hook.attach, self._hook.forget)

    # --- stepping ---

    def step(self, closure: Closure | None = None) -> Any:
        """Refit U if it is time, then step the base with U g in place of the gradients g.

        With divergences that don't need the loss (KL, Rényi), the present `.grad` and the model's last inputs are enough. The
        others need a closure that clears the gradients, computes the loss, calls `backward()` and returns the loss. A refit
        calls it once more in evaluation mode, and for curvature products of the loss (with Gauss–Newton once for each); it has
        to give the same each time.
        """
        streams = Streams(self.model) if closure is not None and self._schedule.may_be_due() else None
        loss = None if closure is None else evaluated(closure)
        parameters = self._meet()
        gradients = gradients_of(parameters)
        if self.processes.due(self._schedule):
            with self.processes.together():
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

        The gradient in J is that of the loss on this batch if a loss is given, else what the closure leaves in `.grad`, else
        the present `.grad`. Returns whether the new U was taken; if it isn't finite, the old one stays.
        """
        if closure is not None and inputs is not None:
            raise LLQRError("refit takes a batch or a closure, not both")
        if targets is not None and loss_fn is None and self._refit.loss_fn is None:
            raise LLQRError("refit was given targets and no loss: give loss_fn too, here or to LLQR.paper")
        parameters = self._meet()
        with self.processes.together():
            batch = (inputs, targets) if inputs is not None else self._own_batch() if closure is None else None
            streams = None if closure is None else Streams(self.model)
            with self._hook.listening(closure is not None):
                if closure is not None:
                    checked_loss(evaluated(closure))
                source = self._source(parameters, closure, streams, batch, loss_fn)
            return self._refit_on(parameters, source)

    def objective(self, inputs: Inputs, targets: Any = None, loss_fn: Loss | None = None) -> Quadratic:
        """The quadratic model that a refit on this batch would fit U to. Changes nothing."""
        parameters = stepped_parameters(self.base, self.model)
        loss_fn, grads = loss_fn or self._refit.loss_fn, gradients_of(parameters)
        source = Source(grads, inputs, targets, loss_fn, own_batch=True, evaluated=loss_fn is not None)
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
        if count := self._refit.check_family(self._hook.slopes):
            self._warn(
                "sum",
                f"the loss adds up its {count} variables, and LLQR.paper expects their mean, as in the paper: steps are about "
                f'{count} times as long. Write reduction="mean" in the loss, or divide the learning rate by {count}',
            )
        gradients, loss_fn = gradients_of(parameters), loss_fn or self._refit.loss_fn
        inputs, targets = (self._hook.inputs(self.model), None) if batch is None else batch
        source = Source(gradients, inputs, targets, loss_fn, batch is not None, closure, self._hook.called, streams)
        if batch is not None and loss_fn is not None:
            return replace(source, called=None, evaluated=True)
        if closure is None or streams is None:
            return source
        with self._hook.listening(False):
            found = self._evaluated(closure, parameters, streams)
        return replace(source, gradients=found or gradients, evaluated=bool(found))  # it may take nothing backward

    def _evaluated(
        self, closure: Closure, parameters: Mapping[str, Tensor], streams: Streams
    ) -> dict[str, Tensor] | None:
        """The gradients with the modules in evaluation mode, and a warning where that can't be."""
        try:
            found = evaluated_gradients(closure, self.model, parameters, streams)
            why = "puts modules into training mode: call model.train() outside of it"
        except Exception as error:
            if self.processes.several:
                raise  # the others may be waiting in their backward passes
            found, why = None, f"doesn't run with the modules in evaluation mode: {type(error).__name__}: {error}"
        if found is None:
            told = "a refit's gradient and curvature are of the network in training, because the closure"
            self._warn("evaluated", f"{told} {why}")
        return found

    def _own_batch(self) -> Batch | None:
        return None if self.refit_batch is None else checked_batch(self.refit_batch())

    def _refit_on(self, parameters: Mapping[str, Tensor], source: Source) -> bool:
        begun, refit = time.perf_counter(), self._refit
        settings = (self._schedule.step, self.ema, self.warm_start, self.preconditioner is None, *refit.settings())
        try:
            with (
                self._hook.listening(False),
                no_autocast(parameters),
                self.processes.refitting(settings, parameters) as whole,
            ):
                used = refit.current(whole, self.preconditioner)
                gradients = self.processes.whole(source.gradients)
                source = replace(source, gradients=gradients, processes=self.processes)
                u = refit(whole, source, used if self.warm_start else None)
                if u.history:
                    self.stats.objective_before, self.stats.objective_after = u.history[0], u.history[-1]
                check_fit(u)
                new = used.blend(u, self.ema)
        except NonFiniteError as error:
            return self._reject(str(error))
        finally:
            self.stats.seconds += time.perf_counter() - begun
        self.preconditioner = new
        self.stats.refits += 1
        self.stats.memory = self._memory()
        return True

    def _preconditioned(self, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        why = "the gradient of {} is not finite, or not U times it: the base gets it as it is"
        if self.preconditioner is None:
            self._left_to_base(not_finite(gradients), why)
            return {}
        with torch.no_grad(), no_autocast(gradients), self.processes.stepping():
            found = self.preconditioner.precondition(self.processes.whole(gradients))
            self._left_to_base(found.nonfinite, why)
            return {name: self.processes.part(g, parameters[name]) for name, g in found.gradients.items()}

    # --- state ---

    def _learned(self, gathered: bool) -> dict[str, Any]:
        u = self.preconditioner
        return {"preconditioner": None if u is None else u.state_dict()}

    def _checked(self, own: Mapping[str, Any], parameters: dict[str, Tensor]) -> Callable[[], None]:
        state = own["preconditioner"]
        u = None if state is None else self._refit.loaded(parameters, state)

        def take_over() -> None:
            self.preconditioner = u

        return take_over

    def _memory(self) -> int:
        return 0 if self.preconditioner is None else self.preconditioner.memory

    def __repr__(self) -> str:
        every = f"every={self._schedule.every!r}, ema={self.ema:g}, warm_start={self.warm_start}"
        return self._shown(every, *self._refit.described())
