"""The lab's networks are the ones that they are named after."""

from __future__ import annotations

import torch
from torch import nn

from llqr_lab.models.resnet import ResNet18


def test_resnet18_has_the_parameters_of_the_cifar_network() -> None:
    model = ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20  # 17 along the way, 3 in shortcuts
    assert all(convolution.bias is None for convolution in convolutions)


def test_resnet18_keeps_the_picture_until_the_second_stage_and_every_parameter_learns() -> None:
    model = ResNet18(classes=7)
    sizes: list[torch.Size] = []
    for stage in model.stages:
        stage.register_forward_hook(lambda module, args, output: sizes.append(output.shape))
    output = model(torch.randn(2, 3, 32, 32))
    assert output.shape == (2, 7)
    assert [tuple(size[1:]) for size in sizes] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    output.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
