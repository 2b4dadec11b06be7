"""The lab's networks by name, in any size: `build("resnet18", classes=100)`."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from llqr.errors import unknown
from llqr_lab.models import convolutional, transformers

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": convolutional.mlp,
    "picture-mlp": convolutional.picture_mlp,
    "picture-net": convolutional.picture_net,
    "resnet18": convolutional.ResNet18,
    "resnet20": convolutional.ResNet20,
    "resnet50": convolutional.ResNet50,
    "vgg16-bn": convolutional.VGG16BN,
    "wrn28-10": convolutional.WideResNet,
    "pyramidnet110": convolutional.PyramidNet,
    "grokking-transformer": transformers.GrokkingTransformer,
    "translation-transformer": transformers.TranslationTransformer,
    "gpt": transformers.GPT,
    "vit": transformers.ViT,
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
