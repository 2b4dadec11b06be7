"""The lab's networks by name, in any size: `build("resnet18", classes=100)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from llqr.errors import unknown
from llqr_lab.models.gpt import GPT, GrokkingTransformer
from llqr_lab.models.pyramidnet import PyramidNet
from llqr_lab.models.resnet import ResNet18, ResNet20, ResNet50
from llqr_lab.models.small import mlp, picture_mlp, picture_net
from llqr_lab.models.translation import TranslationTransformer
from llqr_lab.models.vgg import VGG16BN
from llqr_lab.models.vit import ViT
from llqr_lab.models.wide_resnet import WideResNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "picture-mlp": picture_mlp,
    "picture-net": picture_net,
    "resnet18": ResNet18,
    "resnet20": ResNet20,
    "resnet50": ResNet50,
    "vgg16-bn": VGG16BN,
    "wrn28-10": WideResNet,
    "pyramidnet110": PyramidNet,
    "grokking-transformer": GrokkingTransformer,
    "translation-transformer": TranslationTransformer,
    "gpt": GPT,
    "vit": ViT,
}


def build(name: str, **options: Any) -> nn.Module:
    """The network of this name. Options are the arguments of its class; by default it is the one that the name says."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    known = inspect.signature(MODELS[name]).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    return MODELS[name](**options)
