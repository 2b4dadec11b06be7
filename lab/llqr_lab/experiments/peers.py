"""Other people's optimizers, for runs beside LLQR: torch's Muon; SOAP, Shampoo and SINGD from packages (the extra `peers`);
K-FAC and AdaFisher by our own code.

Some of them are for matrices only, or for the layers that they know: AdamW then takes the parameters that are left, at the same
learning rate, which is how these optimizers are used.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from llqr_lab.errors import ConfigError, RunError
from llqr_lab.experiments.config import Base
from llqr_lab.experiments.kronecker_peers import KFAC, AdaFisher
from llqr_lab.experiments.presets import LARGEST_FACTOR

PRECONDITION_EVERY = 10
"""Steps between new preconditioners, of SOAP, Shampoo and SINGD alike: the default of two of them."""


class Several(Optimizer):
    """Optimizers as one, each with parameters of its own."""

    def __init__(self, parts: Iterable[Optimizer], resumable: bool = True) -> None:
        """`resumable`: their state is made of tensors and builtins, which alone a checkpoint gives back."""
        self.parts, self.resumable = list(parts), resumable
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return defaultdict(dict, {tensor: held for part in self.parts for tensor, held in part.state.items()})

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        """The parts have their own."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() if self.resumable else {} for part in self.parts]
        return {"state": {}, "param_groups": [], "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.resumable:
            names = " and ".join(type(part).__name__ for part in self.parts)
            raise RunError(f"a run by {names} can't go on where it was stopped: remove its folder and begin anew")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class InFloat32(TorchFunctionMode):
    """Where bfloat16 is asked for, float32 is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class MuonInFloat32(Muon):
    """torch's Muon, with its iteration in float32 on a processor.

    torch has it in bfloat16, which most processors only emulate: there a step of an MLP takes 0.7 s in place of 0.03, which
    says nothing about Muon.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        on_processor = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with InFloat32() if on_processor else nullcontext():
            return super().step(closure)  # type: ignore[no-untyped-call]


def muon(base: Base, model: nn.Module) -> Optimizer:
    """For the matrices of linear layers and attention; embeddings and what they share, the last layer, convolutions and
    vectors are AdamW's."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.MultiheadAttention)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(p) for module in (*layers[-1:], *tables) for p in module.parameters()}
    found = dict.fromkeys(p for module in layers for p in module.parameters(recurse=False))
    inside = [p for p in found if p.dim() == 2 and id(p) not in outside]
    if not inside:
        raise ConfigError("muon is for matrices inside a network, and this one has none")
    settings: dict[str, Any] = {"weight_decay": base.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return Several([MuonInFloat32(inside, lr=base.lr, momentum=0.95, **settings), *_rest(base, model, inside)])


def soap(base: Base, model: nn.Module) -> Optimizer:
    kind = _imported("pytorch_optimizer", "SOAP")
    settings = {
        "betas": (0.95, 0.95),
        "weight_decay": base.weight_decay,
        "precondition_frequency": PRECONDITION_EVERY,
        "max_precondition_dim": LARGEST_FACTOR,
    }
    return Several([kind(model.parameters(), lr=base.lr, **settings)])


def shampoo(base: Base, model: nn.Module) -> Optimizer:
    """With blocks of 512 and step lengths taken from SGD's, as in large runs."""
    kind = _imported("pytorch_optimizer", "ScalableShampoo")
    settings = {"weight_decay": base.weight_decay, "preconditioning_compute_steps": PRECONDITION_EVERY}
    return Several([kind(model.parameters(), lr=base.lr, **settings)], resumable=False)


def singd(base: Base, model: nn.Module) -> Optimizer:
    """For linear layers and convolutions, but for those over a vocabulary. Losses of sequences are means over their positions
    too, which it wants to be told."""
    kind = _imported("singd.optim.optimizer", "SINGD")
    known = [module for module in model.modules() if isinstance(module, kind.SUPPORTED_MODULES)]
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    large = {words for words in vocabularies if words > LARGEST_FACTOR}
    inside = list(dict.fromkeys(p for m in known if len(m.weight) not in large for p in m.parameters()))
    if not inside:
        raise ConfigError("singd is for linear layers and convolutions, and this network has none inside")
    sequences = vocabularies and not getattr(model, "one_output", False)
    settings = {
        "weight_decay": base.weight_decay,
        "T": PRECONDITION_EVERY,
        "normalize_lr_cov": True,
        "loss_average": "batch+sequence" if sequences else "batch",
    }
    chosen = kind(model, params=inside, lr=base.lr, momentum=base.momentum, **settings)
    return Several([chosen, *_rest(base, model, inside)], resumable=False)


PEERS: Mapping[str, Callable[[Base, nn.Module], Optimizer]] = {
    "muon": muon,
    "soap": soap,
    "shampoo": shampoo,
    "singd": singd,
    "kfac": lambda base, model: KFAC(model, base.lr, base.momentum, base.weight_decay),
    "adafisher": lambda base, model: AdaFisher(model, base.lr, base.momentum, base.weight_decay),
}


def _rest(base: Base, model: nn.Module, taken: Iterable[nn.Parameter]) -> list[Optimizer]:
    """AdamW for what is left."""
    others = {id(p) for p in taken}
    left = [p for p in model.parameters() if id(p) not in others]
    return [AdamW(left, lr=base.lr, betas=(0.9, base.beta2), weight_decay=base.weight_decay)] if left else []


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{name} isn't installed ({error}): pip install -e './lab[peers]'") from error
