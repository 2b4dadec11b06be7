"""Every setting of the paper by name, at four scales (docs/experiments.md has the scales and the methods).

`paper` has the paper's own hyperparameters (its appendix on experiment details); where the paper is silent, those of the
authors' configurations, which docs/reproduction.md lists. The base rates of `mini` were tuned for the base, with a seed that
isn't reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llqr_lab.errors import ConfigError, check_names, suggestion
from llqr_lab.experiments.config import Config, parsed
from llqr_lab.experiments.paper import PUBLISHED, RESULTS

SCALES = ("paper", "mini", "cpu", "smoke")
STRUCTURES = ("diagonal", "kfac", "ekfac")
DIVERGENCES = ("newton", "ngd", "gauss-newton", "reverse-kl", "renyi")
GEOMETRIES = ("default", *(f"ekfac-{each}" for each in ("ngd", "reverse-kl", "renyi", "newton")))
PEERS = ("adam", "adafisher", "kfac", "shampoo", "soap")
"""Methods of the table in AdaFisher's setting, and SOAP: other optimizers in the place of the base."""
BARE = ("base", "default", *PEERS)
"""Methods that no setting of the paper's LLQR is for."""
SOLVER = {"name": "sgdm", "lr": 0.005, "momentum": 0.9, "clip": 5.0}
"""The paper's inner solver. The clip is from the authors' code: without it the sum over the batch blows up."""
LARGEST_FACTOR = 1024
"""Of SOAP and SINGD: a factor over the words of a vocabulary costs more than the rest of the step."""

NAMES = {"sgdm": "SGDM", "adamw": "AdamW"}
Changes = dict[str, Any]
"""Settings by dotted names."""
SMOKE: Changes = {"epochs": 0, "steps": 4, "evaluate_every": 2, "llqr.every": 2, "llqr.steps": 2}
"""The length of a run at that scale, and of its refits."""


@dataclass(frozen=True)
class Preset:
    summary: str
    settings: dict[str, Any]
    """The base's run at the scale of the paper."""
    methods: tuple[str, ...]
    cpu: Changes
    smoke: Changes
    mini: Changes = field(default_factory=dict)
    """What the other scales change, `mini` on top of `cpu`. What is changed of LLQR ("llqr.…") is for its methods alone."""
    llqr: Changes = field(default_factory=dict)
    """What LLQR's settings are here, beside the paper's usual ones."""
    peers: dict[str, Changes] = field(default_factory=dict)
    """Other optimizers of the table, by what they change; of the length of the run at the scale of the paper only."""
    mini_methods: dict[str, Changes] = field(default_factory=dict)
    seeds: str = "0-4"
    of_paper: bool = True


def _cifar(classes: int, network: str, summary: str, base: dict[str, Any], batch: int = 128) -> tuple[str, Preset]:
    # of the authors' code: Cutout's square, in half of the pictures, and mirrored sides
    data = {"name": f"cifar{classes}", "cutout": 16, "cutout_share": 0.5, "reflect": True}
    # a hundred classes of Tiny ImageNet stand in for CIFAR-100, of which there is no small part at hand
    at_hand = {"name": "cifar10" if classes == 10 else "tiny-imagenet32"}
    adafisher = batch == 256
    ending = "batch256" if adafisher else base["name"]
    name = f"cifar{classes}-{network.replace('wrn28-10', 'wrn28x10').replace('-bn', 'bn')}-{ending}"
    return name, Preset(
        summary=f"{summary} on CIFAR-{classes}, {NAMES[base['name']]}, 200 epochs",
        settings={
            "task": "classification",
            "model": _model(network, classes),
            "data": data,
            "batch": batch,
            "epochs": 200,
            "base": base,
            "schedule": {"name": "cosine"},
        },
        methods=_methods(name),
        cpu={
            "model": _model(network, classes, SMALL),
            "data": at_hand,
            "epochs": 6,
            "llqr.every": 100,
            "llqr.chunk_size": 0,
        },
        # about 1,800 steps of 64 pictures, brought to 16 × 16 pixels but for VGG, whose five poolings need 32
        mini={
            "model": _model(network, classes, MINI),
            "data": {**data, **at_hand, **({"cutout": 16} if network == "vgg16-bn" else {"cutout": 8, "pixels": 16})},
            "batch": batch // 2,
            "epochs": 8 if classes == 10 else 16,
            "record_every": 37,
            "base.lr": 0.3 if adafisher else MINI_RATES[base["name"]],
            "llqr.every": (18 if classes == 10 else 17) * 128 // batch,
        },
        smoke={
            "model": _model(network, classes, MINI),
            "data": {**data, "name": "random-pictures", "classes": classes, "pixels": 32},
            "batch": 16,
            **SMOKE,
            "llqr.chunk_size": 8 if network == "pyramidnet110" else 0,
        },
        llqr={"every": 500 * 128 // batch, "chunk_size": 32 if network == "pyramidnet110" else 0},
        peers=_peers({"adam": 210, "kfac": 107, "shampoo": 36}) if adafisher else {},
        mini_methods=MINI_EQUAL_TIME if adafisher else {},
    )


def _methods(name: str) -> tuple[str, ...]:
    """Those of the paper's table, SOAP beside its other optimizers, and our default."""
    soap = ("soap",) if "shampoo" in RESULTS[name] else ()
    return (*(method for method in RESULTS[name] if method != PUBLISHED), *soap, "default")


def _peers(epochs: Mapping[str, int]) -> dict[str, Changes]:
    """At AdaFisher's learning rates; each trains as many epochs as take the time of its 200, and decays over them.

    SOAP isn't in the paper's table: it has its authors' rate."""
    rates = {"adam": 1e-3, "adafisher": 1e-3, "kfac": 0.3, "shampoo": 0.3, "soap": 3e-3}
    return {
        name: {"base.name": name, "base.lr": rates[name], **({"epochs": epochs[name]} if name in epochs else {})}
        for name in PEERS
    }


def _model(network: str, classes: int, sizes: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"name": network, "classes": classes, **FORMS.get(network, {}), **(sizes[network] if sizes else {})}


FORMS: dict[str, dict[str, Any]] = {"vgg16-bn": {"hidden": 2, "dropout": 0.5}, "pyramidnet110": {"bottleneck": True}}
"""What the names leave open, as the authors' code has it."""
SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet20"},
    "vgg16-bn": {"width": 16},
    "wrn28-10": {"depth": 16, "factor": 2},
    "pyramidnet110": {"depth": 20, "alpha": 24},
}
"""Networks of the same kind that two cores can train."""
MINI: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 8, "blocks": [1, 1, 1, 1]},
    "resnet50": {"width": 8, "blocks": [1, 1, 1, 1]},
    "vgg16-bn": {"width": 4},
    "wrn28-10": {"depth": 10, "width": 4, "factor": 2},
    "pyramidnet110": {"depth": 11, "width": 4, "alpha": 12},
}
"""ResNet-10, ResNet-14 of bottlenecks, WRN-10-2, PyramidNet-11: a whole schedule takes a minute. Also for tests."""
MINI_RATES = {"sgdm": 0.1, "adamw": 1e-2}
MINI_EQUAL_TIME: dict[str, Changes] = {
    "base": {"epochs": 19},
    "adam": {"epochs": 18, "base.lr": 0.01},
    "adafisher": {"epochs": 17, "base.lr": 0.01},
    "kfac": {"epochs": 14, "base.lr": 0.3},
    "shampoo": {"epochs": 8, "base.lr": 0.3},
    "soap": {"epochs": 15, "base.lr": 0.01},
    "ekfac-ngd": {"epochs": 3},
}
"""Of the table in AdaFisher's setting: rates found with seed 9, and as many epochs as take the time of the default's sixteen.
Sixteen of SGDM took 24 s, of Adam 25.5, AdaFisher 26.8, K-FAC 33, Shampoo 57, SOAP 31, LLQR 29, the paper's LLQR 144."""


def _sgdm(lr: float, weight_decay: float) -> dict[str, Any]:
    return {"name": "sgdm", "lr": lr, "momentum": 0.9, "weight_decay": weight_decay}


def _adamw(lr: float, weight_decay: float, beta2: float = 0.999) -> dict[str, Any]:
    return {"name": "adamw", "lr": lr, "momentum": 0.9, "beta2": beta2, "weight_decay": weight_decay}


def _cifars() -> dict[str, Preset]:
    made: list[tuple[str, Preset]] = []
    for classes, decay, adamw_lr in ((10, 5e-4, 1e-3), (100, 1e-3, 5e-4)):
        made += [
            _cifar(classes, "resnet18", "ResNet-18", base) for base in (_sgdm(0.05, decay), _adamw(adamw_lr, decay))
        ]
        # the paper swept the decay of these; what it found is in the authors' configurations
        for network, summary in (
            ("pyramidnet110", "PyramidNet-110"),
            ("vgg16-bn", "VGG-16-BN"),
            ("wrn28-10", "WRN-28-10"),
        ):
            made.append(_cifar(classes, network, summary, _sgdm(0.05, 5e-4)))
    return dict([*made, _cifar(100, "resnet18", "ResNet-18 (AdaFisher's setting)", _sgdm(0.1, 5e-4), 256)])


def _imagenet(epochs: int) -> Preset:
    return Preset(
        summary=f"ResNet-50 on ImageNet, SGDM, {epochs} epochs",
        settings={
            "task": "classification",
            "model": {"name": "resnet50", "classes": 1000},
            "data": {"name": "imagenet", "fit": "stretch"},
            "batch": 256,
            "epochs": epochs,
            "base": _sgdm(0.1, 1e-4),
            "label_smoothing": 0.1,
            # the paper says "a warmup followed by a piecewise decay": the authors' code has 5% of the steps, and tenths after
            # epochs 30, 70 and 90
            "schedule": {
                "name": "piecewise",
                "warmup": epochs * 5004 // 20,
                "milestones": [epoch / epochs for epoch in (30, 70, 90) if epoch < epochs],
            },
        },
        methods=_methods(f"imagenet-resnet50-{'sgdm' if epochs == 100 else '90epochs'}"),
        cpu={
            "model": {"name": "resnet20", "classes": 10},
            "data": {"name": "imagenette", "pixels": 64},
            "batch": 64,
            "epochs": 10,
            "schedule.warmup": 15,
            "llqr.every": 30,
        },
        mini={
            "model": _model("resnet50", 10, MINI),
            "batch": 32,
            "epochs": epochs // 2,
            "evaluate_every": 160,
            "record_every": 32,
            "schedule.warmup": 32 * epochs // 40,
            "llqr.every": 15,
        },
        smoke={
            "model": _model("resnet50", 10, MINI),
            "data": {"name": "random-pictures", "classes": 10, "pixels": 32},
            "batch": 16,
            **SMOKE,
            "schedule.warmup": 1,
        },
        llqr={"every": 1500},
        peers=_peers({}) if epochs == 90 else {},
        mini_methods={name: {"base.lr": MINI_EQUAL_TIME[name]["base.lr"]} for name in PEERS} if epochs == 90 else {},
    )


def _grokking(operation: str) -> Preset:
    return Preset(
        summary=f"grokking: {operation} modulo 97, AdamW without weight decay",
        settings={
            "task": "grokking",
            # of the authors' code, which the paper doesn't speak of
            "model": {"name": "grokking-transformer", "start": "lecun", "reads": "all"},
            "data": {"name": operation, "p": 97, "train": 0.6},
            "batch": 512,
            "steps": 200_000,
            "evaluate_every": 50,
            "base": _adamw(1e-3, 0.0, beta2=0.98),
        },
        methods=("base", "diagonal-ngd", "kfac-ngd", "default"),
        # from torch's own start the plateau outlasts hours on two cores; from smaller weights it is a thousand steps
        cpu={"steps": 6_000, "model": {"name": "grokking-transformer", "start": 0.035}, "llqr.every": 100},
        mini={
            "data.p": 53,
            "batch": 256,
            "steps": 4_000,
            "evaluate_every": 20,
            "model": {"name": "grokking-transformer", "start": 0.035, "width": 64},
            "llqr.every": 25,
        },
        smoke={"data.p": 11, "batch": 16, **SMOKE, "steps": 6, "model.width": 16},
        # the paper's decay is in [0.65, 0.8], another for each operation, and it doesn't say which
        llqr={"ema": 0.7},
        seeds="0-9",
    )


def _translation(data: str, summary: str, of_paper: bool) -> Preset:
    small = {"name": "translation-transformer", "width": 128, "ffn": 256, "heads": 4, "layers": 2, "dropout": 0.1}
    return Preset(
        summary=summary,
        settings={
            "task": "translation",
            "model": {**small, "width": 512, "ffn": 1024, "layers": 6, "dropout": 0.3},
            "data": {"name": data, "bpe": 10_000},
            # the length of a run and of its batches are of the authors' code
            "batch": 16384,
            "epochs": 133,
            "base": _adamw(5e-4, 1e-4, beta2=0.98),
            "label_smoothing": 0.1,
            "schedule": {"name": "inverse-sqrt", "warmup": 4000},
        },
        methods=("base", "ekfac-ngd", "default"),
        cpu={
            "model": small,
            "data.bpe": 4000,
            "batch": 2048,
            "epochs": 8,
            "base.lr": 2e-3,
            "schedule.warmup": 400,
            "llqr.every": 100,
        },
        mini={
            "model": {**small, "width": 64, "ffn": 128},
            "data": {"name": data, "bpe": 2000, "beam": 1, "sentences": 1000},
            "batch": 512,
            "epochs": 0,
            "steps": 2000,
            "evaluate_every": 250,
            "record_every": 50,
            "base.lr": 4e-3,
            "schedule.warmup": 200,
            "llqr.every": 20,
        },
        smoke={
            "model": {**small, "width": 16, "ffn": 32, "layers": 1},
            "data": {"name": "tiny-translation", "bpe": 60},
            "batch": 64,
            **SMOKE,
            "schedule.warmup": 2,
        },
        # the paper has full factors for embeddings, and the 8,848 words of IWSLT14's German are more than usual
        llqr={"every": 250, "ema": 0.925, "max_dim": 16384},
        of_paper=of_paper,
    )


def _shakespeare(base: dict[str, Any]) -> Preset:
    model = {"name": "gpt", "width": 384, "layers": 6, "heads": 6, "length": 256, "dropout": 0.2}
    return Preset(
        summary=f"a character GPT on tinyshakespeare, {NAMES[base['name']]}",
        settings={
            "task": "language",
            "model": model,
            "data": {"name": "shakespeare"},
            "batch": 64,
            "steps": 5000,
            "evaluate_every": 250,
            "base": base,
            "schedule": {"name": "cosine", "warmup": 100},
        },
        methods=("base", *(f"{structure}-ngd" for structure in STRUCTURES), "default"),
        cpu={
            "model": {**model, "width": 64, "layers": 2, "heads": 4, "length": 64, "dropout": 0.0},
            "batch": 32,
            "steps": 1500,
            "evaluate_every": 100,
            "llqr.every": 50,
        },
        smoke={
            "model": {**model, "width": 16, "layers": 1, "heads": 2, "length": 8},
            "data": {"name": "tiny-text"},
            "batch": 4,
            **SMOKE,
            "schedule.warmup": 1,
        },
        llqr={"every": 250},
        of_paper=False,
    )


def _fashion(network: str, name: str, imbalance: float = 1.0) -> Preset:
    rare = {"imbalance": imbalance} if imbalance != 1 else {}
    rarer = f", the last class {imbalance:g} times rarer than the first" if rare else ""
    shorter: Changes = {"llqr.every": 25} if rare else {"epochs": 3, "evaluate_every": 50, "llqr.every": 100}
    if network == "picture-mlp":
        shorter["model.width"] = 256
    return Preset(
        summary=f"{name} on Fashion-MNIST{rarer}, SGDM",
        settings={
            "task": "classification",
            "model": {"name": network},
            "data": {"name": "fashion", **rare},
            "batch": 128,
            "epochs": 10,
            "base": _sgdm(0.05, 0.0),
            "schedule": {"name": "cosine"},
        },
        methods=("base", *(GEOMETRIES if rare else [*(f"{each}-ngd" for each in STRUCTURES), "default"])),
        cpu=shorter,
        smoke={
            "model": {"name": network, "pixels": 28, **({"width": 8} if network == "picture-mlp" else {})},
            "data": {"name": "random-pictures", "pixels": 28, "channels": 1, **rare},
            "batch": 16,
            **SMOKE,
        },
        of_paper=False,
    )


PRESETS: dict[str, Preset] = {
    **{
        f"grokking-{operation}": _grokking(operation)
        for operation in ("add", "subtract", "multiply", "divide", "exponentiate")
    },
    **_cifars(),
    "imagenet-resnet50-sgdm": _imagenet(100),
    "imagenet-resnet50-90epochs": _imagenet(90),
    "iwslt14-transformer-adamw": _translation("iwslt14", "IWSLT14 German to English, AdamW", True),
    "multi30k-transformer-adamw": _translation("multi30k", "Multi30k German to English, AdamW", False),
    "fashion-mlp": _fashion("picture-mlp", "an MLP"),
    "fashion-convnet": _fashion("picture-net", "a small convnet"),
    "fashion-imbalanced": _fashion("picture-net", "a small convnet", imbalance=100.0),
    "shakespeare-gpt-sgdm": _shakespeare(_sgdm(0.1, 0.0)),
    "shakespeare-gpt-adamw": _shakespeare(_adamw(3e-3, 0.0, beta2=0.99)),
}


def known_preset(name: str) -> Preset:
    check_names([name], PRESETS, "preset")
    return PRESETS[name]


def resolve(name: str, scale: str, method: str, seed: int, changes: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a preset, with what is changed by hand."""
    preset = known_preset(name)
    check_names([scale], SCALES, "scale")
    own = {"paper": {}, "cpu": preset.cpu, "mini": preset.cpu | preset.mini, "smoke": preset.smoke}[scale].copy()
    if method in PEERS:
        if method not in preset.peers:
            raise ConfigError(f"{name} has no '{method}' in its table: take it as the base, --set base.name={method}")
        own |= {key: value for key, value in preset.peers[method].items() if scale == "paper" or key != "epochs"}
    if scale == "mini":
        own |= preset.mini_methods.get(method, {})
    around: dict[str, Any] = {"default_llqr": True} if method == "default" else {}
    if method in BARE:
        own = {name: value for name, value in own.items() if not name.startswith("llqr.")}
    else:
        around = {"llqr": _wrapper(preset, scale, method)}
    config = parsed({**preset.settings, **around}).changed(own)
    named = {"seed": seed, "preset": name, "scale": scale, "method": method}
    return config.changed(named).by_hand(changes or {})


def _wrapper(preset: Preset, scale: str, method: str) -> dict[str, Any]:
    structure, _, divergence = method.partition("-")
    if structure not in ("scalar", *STRUCTURES) or divergence not in DIVERGENCES:
        known = [f"{each}-{other}" for each in STRUCTURES for other in DIVERGENCES]
        raise ConfigError(f"there is no method '{method}'{suggestion(method, [*BARE, *known])}")
    own = {"ema": 0.9 if divergence == "newton" else 0.95, "solver": SOLVER, **preset.llqr}
    if preset.settings["task"] == "grokking" and structure == "diagonal":
        own["solver"] = {**SOLVER, "lr": 0.01}
    if structure not in ("kfac", "ekfac"):
        own.pop("max_dim", None)
    # a batch of its own as in the authors' code
    return {"structure": structure, "divergence": divergence, "fresh_batch": scale != "cpu", **own}
