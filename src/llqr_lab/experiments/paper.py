"""The paper's results: accuracy in percent or BLEU, with the standard error, and training time as a multiple of the base's.

From its tables on ResNet-18, on other CIFAR architectures, on ImageNet and IWSLT14, and on the comparison at batch size 256.
"""

from __future__ import annotations

from typing import NamedTuple


class Reported(NamedTuple):
    score: float
    error: float | None = None
    time: float | None = None

    @property
    def shown(self) -> tuple[str, str]:
        """The score with its error, and the time; empty where the paper has none."""
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.score:.2f}{error}", "" if self.time is None else f"×{self.time:.3g}"


PUBLISHED = "base, as AdaFisher's authors have it"
"""A column that the paper took from elsewhere, as those of the other optimizers; there is no run of it here."""


METHODS = (
    "base",
    "diagonal-newton",
    "diagonal-ngd",
    "kfac-newton",
    "kfac-ngd",
    "ekfac-newton",
    "ekfac-ngd",
)


def _row(methods: tuple[str, ...], *cells: tuple[float, ...]) -> dict[str, Reported]:
    return {method: Reported(*cell) for method, cell in zip(methods, cells, strict=True)}


_THREE = ("base", "ekfac-newton", "ekfac-ngd")

RESULTS: dict[str, dict[str, Reported]] = {
    "cifar10-resnet18-sgdm": _row(
        METHODS,
        (96.19, 0.07, 1.0),
        (96.25, 0.04, 1.08),
        (96.29, 0.07, 1.08),
        (96.29, 0.10, 1.22),
        (96.33, 0.19, 1.22),
        (96.37, 0.05, 1.34),
        (96.37, 0.05, 1.31),
    ),
    "cifar10-resnet18-adamw": _row(
        METHODS,
        (94.54, 0.11, 1.0),
        (94.64, 0.09, 1.01),
        (94.55, 0.06, 1.01),
        (94.73, 0.10, 1.05),
        (94.67, 0.18, 1.04),
        (94.72, 0.04, 1.12),
        (94.95, 0.05, 1.15),
    ),
    "cifar100-resnet18-sgdm": _row(
        METHODS,
        (78.97, 0.22, 1.0),
        (79.21, 0.09, 1.08),
        (79.20, 0.30, 1.08),
        (79.42, 0.25, 1.22),
        (79.22, 0.11, 1.23),
        (79.83, 0.08, 1.31),
        (79.96, 0.10, 1.32),
    ),
    "cifar100-resnet18-adamw": _row(
        METHODS,
        (76.09, 0.27, 1.0),
        (76.02, 0.31, 1.01),
        (76.28, 0.13, 1.01),
        (76.32, 0.39, 1.05),
        (76.49, 0.06, 1.06),
        (76.96, 0.03, 1.13),
        (77.07, 0.16, 1.13),
    ),
    "cifar10-pyramidnet110-sgdm": _row(_THREE, (97.18, 0.08, 1.0), (97.26, 0.04, 1.41), (97.21, 0.04, 1.41)),
    "cifar10-vgg16bn-sgdm": _row(_THREE, (95.10, 0.06, 1.0), (95.41, 0.05, 1.18), (95.27, 0.09, 1.17)),
    "cifar10-wrn28x10-sgdm": _row(_THREE, (96.94, 0.04, 1.0), (97.10, 0.01, 1.26), (97.04, 0.04, 1.26)),
    "cifar100-pyramidnet110-sgdm": _row(_THREE, (83.96, 0.11, 1.0), (84.00, 0.07, 1.41), (84.40, 0.21, 1.41)),
    "cifar100-vgg16bn-sgdm": _row(_THREE, (75.65, 0.12, 1.0), (76.31, 0.05, 1.19), (76.32, 0.16, 1.17)),
    "cifar100-wrn28x10-sgdm": _row(_THREE, (82.50, 0.08, 1.0), (82.72, 0.11, 1.25), (82.80, 0.17, 1.25)),
    "cifar100-resnet18-batch256": _row(
        ("base", "ekfac-ngd", PUBLISHED, "adam", "adafisher", "kfac", "shampoo"),
        (77.52, 0.13, 1.0),
        (78.34, 0.08, 1.25),
        (76.56, 0.20, 1.0),
        (75.74, 0.10, 1.16),
        (77.28, 0.20, 1.33),
        (76.03, 0.30, 2.32),
        (76.78, 0.20, 10.82),
    ),
    "imagenet-resnet50-sgdm": _row(
        ("base", "kfac-newton", "ekfac-newton", "kfac-ngd", "ekfac-ngd"),
        (77.42, 0.12, 1.0),
        (77.78, 0.31, 1.027),
        (76.93, 0.95, 1.032),
        (77.98, 0.08, 1.027),
        (78.05, 0.05, 1.032),
    ),
    "imagenet-resnet50-90epochs": _row(
        ("base", "ekfac-ngd", "adam", "adafisher", "kfac", "shampoo"),
        (77.19, 0.02, 1.0),
        (77.59, 0.04, 1.034),
        (67.78,),
        (76.95,),
        (70.96,),
        (72.82,),
    ),
    "iwslt14-transformer-adamw": _row(("base", "ekfac-ngd"), (34.24, 0.12, 1.0), (34.51, 0.05, 1.16)),
}
