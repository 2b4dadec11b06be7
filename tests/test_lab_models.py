"""The lab's networks are the ones that they are named after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llqr_lab.errors import ConfigError
from llqr_lab.models.convolutional import (
    VGG16BN,
    Bottleneck,
    PaddedShortcut,
    PyramidBlock,
    PyramidNet,
    ResNet18,
    ResNet50,
)
from llqr_lab.models.zoo import MODELS, build
from small_lab import OPTIONS, batch, small

VIT_IMAGENET = {"classes": 1000, "picture": 224, "patch": 16}
COUNTS: list[tuple[str, dict[str, Any], int]] = [
    # 784·512 + 512 + 512·512 + 512 + 512·10 + 10
    ("mlp", {}, 669_706),
    # what the CIFAR form is said to have everywhere: 11.17M
    ("resnet18", {}, 11_173_962),
    # He et al. 2016, table 6: 0.27M
    ("resnet20", {}, 269_722),
    # torchvision's documentation of resnet50
    ("resnet50", {}, 25_557_032),
    # with the stem for small pictures: what CIFAR-10 tables give, 23.52M
    # 14,710,464 weights and 4,224 biases of convolutions, 8,448 of BatchNorm, 5,130 of the head: 14.7M in CIFAR tables
    ("vgg16-bn", {}, 14_728_266),
    # Zagoruyko & Komodakis 2016: WRN-28-10 with 36.5M
    ("wrn28-10", {}, 36_479_194),
    # and WRN-16-8 with 11.0M
    ("wrn28-10", {"depth": 16, "factor": 8}, 10_961_370),
    # Han et al. 2017: 1.7M, 3.8M and 28.3M; to the digit (α = 270, 10 and 100 classes) in the tests of pytorchcv, which rounds
    # widths where the paper cuts them off, and so has more for the first two
    ("pyramidnet110", {"alpha": 48}, 1_739_730),
    ("pyramidnet110", {"alpha": 84}, 3_855_054),
    ("pyramidnet110", {}, 28_485_477),
    ("pyramidnet110", {"classes": 100}, 28_511_307),
    # fairseq's transformer_iwslt_de_en with its prepared data
    ("translation-transformer", {}, 39_469_056),
    # Radford et al. 2019's smallest: 124M, and to the digit in transformers' gpt2
    ("gpt", {"words": 50_257, "length": 1024, "width": 768, "heads": 12, "layers": 12}, 124_439_808),
    # torchvision's documentation of vit_b_16; ViT-S/16 in timm's table of results, 22.05M
    ("vit", {**VIT_IMAGENET, "width": 768, "heads": 12}, 86_567_656),
    ("vit", {**VIT_IMAGENET, "width": 384, "heads": 6}, 22_050_664),
]


@pytest.mark.parametrize(("name", "options", "count"), COUNTS, ids=[f"{name}-{n}" for name, _, n in COUNTS])
def test_parameters_are_as_many_as_were_published(name: str, options: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = build(name, **options)
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_grokking_transformer_has_the_parameters_of_its_formula() -> None:
    words, width, block = 99, 128, 12 * 128**2 + 13 * 128
    with torch.device("meta"):
        model = build("grokking-transformer")
    expected = (words + 4) * width + 2 * block + 2 * width + (width + 1) * words
    assert sum(p.numel() for p in model.parameters()) == expected


def stage_sizes(model: nn.Module, side: int) -> list[tuple[int, ...]]:
    """What the stages send on, without any arithmetic."""
    sizes: list[tuple[int, ...]] = []
    stages = model.get_submodule("stages")
    assert isinstance(stages, nn.Sequential)
    for stage in stages:
        stage.register_forward_hook(lambda module, args, output: sizes.append(tuple(output.shape[1:])))
    model.to("meta")(torch.empty(2, 3, side, side, device="meta"))
    return sizes


def test_the_stages_of_full_networks() -> None:
    with torch.device("meta"):
        small_pictures = [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
        assert stage_sizes(ResNet18(), 32) == small_pictures
        assert stage_sizes(build("resnet20"), 32) == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
        assert stage_sizes(ResNet50(), 224) == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]
        assert stage_sizes(build("wrn28-10"), 32) == [(160, 32, 32), (320, 16, 16), (640, 8, 8)]
        assert stage_sizes(build("pyramidnet110"), 32) == [(106, 32, 32), (196, 16, 16), (286, 8, 8)]
        assert VGG16BN().features(torch.empty(2, 3, 32, 32)).shape == (2, 512, 1, 1)


def test_layers_are_as_many_as_the_names_say() -> None:
    def along(model: nn.Module) -> int:
        """Convolutions and linear layers, those in shortcuts left out."""
        kinds = (nn.Conv2d, nn.Linear)
        return sum(isinstance(m, kinds) and "shortcut" not in name for name, m in model.named_modules())

    with torch.device("meta"):
        # the 28 of a wide ResNet are convolutions alone, 25 and three in shortcuts
        depths = {"resnet18": 18, "resnet20": 20, "resnet50": 50, "wrn28-10": 26, "pyramidnet110": 110}
        assert {name: along(build(name)) for name in depths} == depths
        assert along(build("vgg16-bn")) == 14  # the 16 of ImageNet's form have three linear layers


def test_convolutions_have_biases_in_vgg_alone() -> None:
    with torch.device("meta"):
        for name in ("resnet18", "resnet20", "resnet50", "vgg16-bn", "wrn28-10", "pyramidnet110"):
            convolutions = [module for module in build(name).modules() if isinstance(module, nn.Conv2d)]
            assert {convolution.bias is not None for convolution in convolutions} == {name == "vgg16-bn"}, name


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_have_a_logit_for_each_class_or_word(name: str) -> None:
    inputs, targets = batch(name)
    output = small(name)(*inputs)
    classes = OPTIONS[name].get("classes") or OPTIONS[name].get("words") or OPTIONS[name]["target_words"]
    assert output.shape == (*targets.shape, classes)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_seed_gives_the_same_weights_and_evaluation_the_same_output(name: str) -> None:
    model, same, other = small(name, 1), small(name, 1), small(name, 2)
    assert all(torch.equal(p, same.state_dict()[key]) for key, p in model.state_dict().items())
    assert any(not torch.equal(p, other.state_dict()[key]) for key, p in model.state_dict().items())
    inputs, _ = batch(name)
    first = model.eval()(*inputs)
    assert torch.equal(first, model(*inputs))
    assert torch.equal(first, same.eval()(*inputs))
    assert not torch.equal(first, other.eval()(*inputs))


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "dropout" in options])
def test_dropout_is_there_in_training_alone(name: str) -> None:
    inputs, _ = batch(name)
    torch.manual_seed(0)
    model, without = small(name, dropout=0.5), small(name, dropout=0.0)
    assert not torch.equal(model(*inputs), model(*inputs))
    without.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(*inputs), without.eval()(*inputs))


def test_the_padded_shortcut_keeps_channels_and_adds_zeros() -> None:
    x = torch.randn(2, 3, 4, 6)
    kept = PaddedShortcut(3, 5, 2)(x)
    assert kept.shape == (2, 5, 2, 3)
    assert torch.equal(kept[:, :3], x[:, :, ::2, ::2])
    assert not kept[:, 3:].any()
    mean = PaddedShortcut(3, 5, 2, mean=True)(x)
    torch.testing.assert_close(mean[:, :3], x.unflatten(2, (2, 2)).unflatten(4, (3, 2)).mean((3, 5)))
    assert not mean[:, 3:].any()
    assert torch.equal(PaddedShortcut(3, 3, 1, mean=True)(x), x)


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "wrn28-10", "pyramidnet110"])
def test_pictures_with_odd_sides_shrink_alike_on_both_ways_of_a_block(name: str) -> None:
    assert small(name)(torch.randn(2, 3, 9, 7)).shape == (2, 3)


def closed(block: nn.Module, norm: str, x: Tensor) -> Tensor:
    """What a block makes of x when F is zero."""
    nn.init.zeros_(block.get_submodule(norm).get_parameter("weight"))
    return block(x)  # type: ignore[no-any-return]


def test_what_is_left_of_a_block_without_its_residual_is_its_shortcut() -> None:
    x = torch.randn(2, 4, 4, 4)
    resnet, pyramid = small("resnet20", width=4).get_submodule("stages.1.0"), PyramidBlock(4, 6, 2)
    shrunk, widened = closed(resnet, "norm2", x), closed(pyramid, "norms.2", x)
    assert torch.equal(shrunk, PaddedShortcut(4, 8, 2)(x).relu())
    assert torch.equal(widened, PaddedShortcut(4, 6, 2, mean=True)(x))  # no ReLU behind the sum


def test_widths_of_pyramidnet_grow_evenly() -> None:
    blocks = [module for module in PyramidNet(depth=14, alpha=9, width=5).modules() if isinstance(module, PyramidBlock)]
    assert [block.norms[-1].num_features for block in blocks] == [6, 8, 9, 11, 12, 14]
    assert [block.convolutions[0].stride[0] for block in blocks] == [1, 1, 2, 1, 2, 1]


def test_bottlenecks_of_pyramidnet() -> None:
    """Inside, block k of N has the whole number nearest to width + α k / N; it sends on four times as many. The 3 × 3
    convolution has the stride."""
    model = PyramidNet(depth=20, alpha=9, width=5, bottleneck=True)
    blocks = [module for module in model.modules() if isinstance(module, PyramidBlock)]
    shapes = [[tuple(each.weight.shape) for each in block.convolutions] for block in blocks]
    assert [shape[1][:2] for shape in shapes] == [(6, 6), (8, 8), (10, 10), (11, 11), (12, 12), (14, 14)]
    assert shapes[1] == [(8, 24, 1, 1), (8, 8, 3, 3), (32, 8, 1, 1)]
    assert [[each.stride[0] for each in block.convolutions] for block in blocks[1:3]] == [[1, 1, 1], [1, 2, 1]]
    assert model(torch.randn(2, 3, 9, 7)).shape == (2, 10)
    with pytest.raises(ValueError, match="bottlenecks has a depth of 11, 20"):
        PyramidNet(depth=14, bottleneck=True)


def test_the_head_of_vgg() -> None:
    """512-512-classes with biases, and a dropout before the first two."""
    model = VGG16BN(hidden=2, dropout=0.5)
    kinds = [type(module) for module in model.head]
    assert kinds == [nn.Dropout, nn.Linear, nn.ReLU] * 2 + [nn.Linear]
    assert sum(p.numel() for p in model.head.parameters()) == 2 * (512 * 512 + 512) + 512 * 10 + 10


def test_resnet50_has_its_strides_in_the_middle() -> None:
    blocks = [module for module in small("resnet50").modules() if isinstance(module, Bottleneck)]
    assert all(block.conv1.stride == (1, 1) for block in blocks)
    assert [block.conv2.stride[0] for block in blocks] == [1, 2]  # v1.5


def test_vit_reads_a_word_of_its_own() -> None:
    model = small("vit").eval()
    model.get_parameter("position").data.zero_()
    x = torch.randn(2, 3, 8, 8)
    moved = x.roll(4, 3)  # without positions, patches can change places
    torch.testing.assert_close(model(x), model(moved))
    assert model.get_parameter("position").shape[0] == 5


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_by_its_name_alone(name: str) -> None:
    with torch.device("meta"):
        assert isinstance(build(name), nn.Module)


def test_unknown_names_and_options_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no model 'resnet-18': did you mean resnet18\?"):
        build("resnet-18")
    with pytest.raises(ConfigError, match=r"option of vgg16-bn 'widht': did you mean width.*classes, width"):
        build("vgg16-bn", widht=3)
    for name, options, message in (
        ("wrn28-10", {"depth": 27}, "not 27"),
        ("pyramidnet110", {"depth": 4}, "not 4"),
        ("vit", {"picture": 30}, "patches of side 4"),
        ("gpt", {"width": 9}, "6 heads"),
        ("translation-transformer", {"width": 9}, "even"),
        ("translation-transformer", {"width": 10}, "4 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, **options)
