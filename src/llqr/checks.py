"""What is looked at before any work is done: inputs, losses, finite values; and how a model is called without changing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llqr.errors import ChainError, LLQRError, NonFiniteError

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
Loss = Callable[[Tensor, Any], Tensor]


class ShownWithOptions:
    """An object that is shown as a call with its options: it reads well in `print(optimizer)` and in errors, and the ranks of a
    process group, which compare what they do by its words, see the same."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


def as_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with: a tensor alone, a tuple spread out, a dict as keywords. Copies, for in-place modules."""
    if isinstance(inputs, Mapping):
        return (), {name: _copy(value) for name, value in inputs.items()}
    return tuple(map(_copy, inputs)) if isinstance(inputs, (tuple, list)) else (_copy(inputs),), {}


def call(
    model: nn.Module, tensors: Mapping[str, Tensor], inputs: Inputs, function: Callable[[], Any] | None = None
) -> Any:
    """What a model, or a function that calls it, returns with these tensors in the place of the model's own.

    Each place is named once. Torch's own search for ties names a module that is used twice under both of its names, and leaves
    the tensors that it was called with in it.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    given: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for members in (nn.Module.named_parameters, nn.Module.named_buffers):
            for place, tensor in members(module, path, recurse=False, remove_duplicate=False):
                name = names.get(id(tensor))
                if name is not None and name in tensors:
                    given[place] = tensors[name]
    if function is None:
        return functional_call(model, given, *as_arguments(inputs), tie_weights=False)
    held = {f"model.{place}": tensor for place, tensor in given.items()}
    return functional_call(_Calling(model, function), held, (), tie_weights=False)


class _Calling(nn.Module):
    """A function that calls a model, as a module that holds it."""

    def __init__(self, model: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self) -> Any:
        return self._function()


def tensors_in(value: Any, dataclasses: bool = False) -> list[Tensor]:
    """The tensors in a value, in order, however deep in tuples, lists and mappings, and in dataclasses if they are asked for.

    Inputs are copied and cut as well, which dataclasses aren't.
    """
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses and is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, each.name, None) for each in fields(value)]
    return [tensor for part in parts for tensor in tensors_in(part, dataclasses)]


def check_model(model: nn.Module, inputs: Inputs, without_inputs: bool = False) -> None:
    """Raise for what is no model, and for inputs that it can't take."""
    if torch.is_inference_mode_enabled():
        raise LLQRError("torch.inference_mode() is on, and nothing can be differentiated under it: leave it first")
    if not isinstance(model, nn.Module):
        raise LLQRError(f"the model is a {type(model).__name__}, not an nn.Module")
    refuse_wrapped(model)
    tensors = tensors_in(inputs)
    if not tensors and not without_inputs:
        raise LLQRError(f"inputs are a tensor, or a tuple or dict with tensors in it; got {type(inputs).__name__}")
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    if len(devices) > 1:
        raise LLQRError(f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): move it to one")
    elsewhere = {tensor.device for tensor in tensors} - devices
    if devices and elsewhere:
        raise LLQRError(f"the inputs are on {elsewhere.pop()}, the model on {devices.pop()}: move one of them")
    for tensor in tensors:
        if tensor.numel() == 0:
            raise LLQRError(f"the inputs are empty, shape {tuple(tensor.shape)}: give at least one example")
        if tensor.is_floating_point():  # a mask may hold -inf; the output has to be finite
            check_finite(tensor.masked_fill(tensor == -math.inf, 0.0), "the inputs")


def refuse_scripted(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise LLQRError("the model is TorchScript: give the module as it was before it was scripted or traced")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise for models in wrappers that can't be called as a function of their parameters."""
    refuse_scripted(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            what = f"{name!r} is" if name else "the model is"
            raise LLQRError(f"{what} wrapped in {type(module).__name__}: give what is in it, its attribute .module")


def kinds_of(inputs: Inputs) -> str:
    """Shapes and dtypes, for messages; of integers, what to do where no embedding takes them."""
    tensors = tensors_in(inputs)
    told = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
    whole = any(not (tensor.is_floating_point() or tensor.dtype == torch.bool) for tensor in tensors)
    return told + (" (integers are for an nn.Embedding: else convert them, as in inputs.double())" if whole else "")


def batch_size_of(inputs: Inputs) -> int:
    """How many examples the inputs hold: their leading dimension; 1 for vectors, which are single examples."""
    batched = [t for t in tensors_in(inputs) if t.dim() > 1 or not t.is_floating_point()]
    return batched[0].shape[0] if batched and batched[0].dim() else 1


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise if there is a NaN or an infinity, and say where."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    bad = ~tensor.isfinite()
    if bad.any():
        place = tuple(int(i) for i in bad.nonzero()[0])
        value = float(tensor.detach()[place].real)
        more = int(bad.sum()) - 1
        also = f", and in {more} more places" if more else ""
        raise NonFiniteError(f"there is a value that is not finite in {what}: {value} at index {place}{also}")


def checked_number(what: str, value: object, inside: Callable[[float], bool], meaning: str) -> float:
    """The number; an error that says what it has to be, where it is none or outside of its bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not inside(value):
        raise LLQRError(f"{what} is {meaning}, not {value!r}")
    return float(value)


def checked_integer(what: str, value: object, meaning: str = "a positive integer") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LLQRError(f"{what} is {meaning}, not {value!r}")
    return value


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise LLQRError(f"{name} is a function, not a {type(value).__name__}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise LLQRError(f"{name} is True or False, not {value!r}")


def check_count(what: str, value: object, least: int = 0) -> None:
    """Raise unless this is a whole number that a computer counts to; one beyond that has no repr."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise LLQRError(f"{what} isn't a whole number of {least} or more")


def check_amount(what: str, value: object) -> None:
    """Raise unless this is a finite number of zero or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**1023:
        raise LLQRError(f"{what} isn't a finite number of zero or more")


def check_tensors(what: str, value: object) -> None:
    """Raise unless these are tensors of finite real numbers, by their names."""
    if not isinstance(value, Mapping):
        raise LLQRError(f"{what} isn't a mapping of tensors")
    for name, tensor in value.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise LLQRError(f"{what} has under {name!r} what isn't a tensor of real numbers")
        check_finite(tensor, f"{what}, under {name!r}")


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise for a parameter that can't be stepped."""
    check_kind(name, parameter)
    check_finite(parameter, f"parameter {name!r}")


def check_precision(name: str, parameter: Tensor) -> None:
    """Raise for a parameter of half precision."""
    if torch.finfo(parameter.dtype).bits < 32:
        raise ChainError(f"parameter {name!r} is {parameter.dtype}, too coarse for exact steps: write model.float()")


def check_kind(name: str, parameter: Tensor) -> None:
    """Raise for a parameter that isn't of real floating-point numbers; its values aren't looked at."""
    if isinstance(parameter, nn.UninitializedParameter):
        raise ChainError(f"parameter {name!r} has no shape yet: call the model once first")
    if parameter.is_complex():
        raise ChainError(f"parameter {name!r} is complex; only real ones can be stepped")
    if not parameter.is_floating_point():
        raise ChainError(f"parameter {name!r} is {parameter.dtype}; only floating point ones can be stepped")


def check_weights(weights: Any, device: torch.device) -> None:
    """Raise unless these are weights of variables: real numbers of zero or more, on the device of the inputs."""
    if not isinstance(weights, Tensor) or weights.is_complex():
        raise LLQRError(f"the weights are a tensor of real numbers, one a variable of the output; not {weights!r:.100}")
    if weights.device != device:
        raise LLQRError(f"the weights are on {weights.device}, the inputs on {device}: move one of them")
    check_finite(weights, "the weights")
    if (weights < 0).any() or weights.sum() == 0:
        raise LLQRError("the weights are numbers of zero or more, not all zero")


def check_weights_fit(weights: Tensor, output: Tensor) -> None:
    """Raise for weights that can't be one a variable of this output, whatever its variables are."""
    following = iter(output.shape)
    if weights.dim() == 0 or not all(size in following for size in weights.shape):  # the output's sizes, some left out
        shapes = f"the weights have shape {tuple(weights.shape)}, and the output {tuple(output.shape)}"
        raise LLQRError(f"{shapes}: give one a variable of it (an example, a token)")


def bound(loss_fn: Loss | None, targets: Any) -> Callable[[Tensor], Tensor]:
    """ℓ as a function of the output alone."""

    def loss(output: Tensor) -> Tensor:
        if loss_fn is None:
            raise LLQRError(
                "this divergence needs the loss: give QuadraticModel loss_fn and targets, an optimizer's step a closure; if it "
                "is your own, leave out its needs_loss = False"
            )
        return loss_fn(output, targets).reshape(())

    return loss


def loss_gradient(loss_fn: Loss, output: Tensor, targets: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """ℓ with its targets bound, and ∇ℓ(x_N); an error where the loss isn't a finite scalar function of the output alone."""
    if isinstance(targets, Tensor):
        targets = targets.detach()
        check_finite(targets, "the targets")
    leaf = output.detach().clone().requires_grad_()
    with torch.enable_grad():
        try:
            value = loss_fn(leaf, targets)
        except Exception as error:
            if targets is None:
                raise LLQRError(f"the targets are None: give the targets, as loss_fn failed ({error})") from error
            raise
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LLQRError(f"loss_fn returned {got}; it must return one number, the mean over the batch")
        check_finite(value.detach(), "the loss")
        gradient = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
        if gradient is None:
            raise LLQRError("the loss doesn't depend on the output: nothing to descend (was it detached?)")
        if loss_fn(output.detach(), targets).requires_grad:
            raise LLQRError(
                "the loss depends on parameters other than through the output (weight decay, a term on an activation?): leave "
                "decay to the optimizer, let the model return what the loss is about, or state such terms in a LayerwiseLoss"
            )
    check_finite(gradient, "the gradient of the loss")
    return bound(loss_fn, targets), gradient


def check_mean(loss_fn: Loss, output: Tensor, targets: Any) -> None:
    """A mean doesn't change when the batch is given twice; a sum doubles."""
    if not isinstance(targets, Tensor) or targets.dim() == 0 or output.dim() == 0 or len(targets) != len(output):
        return
    try:
        with torch.no_grad(), frozen_rng():
            once = float(loss_fn(output, targets))
            twice = float(loss_fn(torch.cat((output, output)), torch.cat((targets, targets))))
    except Exception:  # a loss that knows its batch proves nothing
        return
    if abs(once) > 1e-6 and abs(twice - 2 * once) < 1e-4 * abs(once):
        raise LLQRError("loss_fn adds the examples up: it must return their mean (reduction='mean')")


def frozen_rng() -> AbstractContextManager[None]:
    """Leave the random streams as they were."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else [])


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes of an object for a while."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with its tensors changed, however deep in tuples, lists and mappings.

    Mappings become dicts, unless they know how to move themselves to a device, as those of frameworks do, which have attributes
    that a model may read.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict or (isinstance(value, Mapping) and not hasattr(value, "to")):
        return {name: mapped(part, change) for name, part in value.items()}
    if hasattr(value, "_fields"):  # a namedtuple takes them one by one
        return type(value)(*(mapped(part, change) for part in value))
    return type(value)(mapped(part, change) for part in value) if type(value) in (tuple, list) else value


def _copy(value: Any) -> Any:
    return mapped(value, Tensor.clone)
