"""The lab's networks by name, in any size: `build("resnet18", classes=100)`."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from llqr_lab.errors import check_names
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
    check_names([name], MODELS, "model")
    check_names(options, inspect.signature(MODELS[name]).parameters, f"option of {name}")
    return MODELS[name](**options)
