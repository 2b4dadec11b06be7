"""The paper's results: accuracy in percent or BLEU, with the standard error, and training time as a multiple of the base's."""

from typing import Any, NamedTuple


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


METHODS = ("base", "diagonal-newton", "diagonal-ngd", "kfac-newton", "kfac-ngd", "ekfac-newton", "ekfac-ngd")


def _row(methods: tuple[str, ...], *columns: tuple[Any, ...]) -> dict[str, Reported]:
    """From columns of scores, errors and times."""
    return {method: Reported(*numbers) for method, *numbers in zip(methods, *columns, strict=True)}


_THREE = ("base", "ekfac-newton", "ekfac-ngd")

RESULTS: dict[str, dict[str, Reported]] = {
    "cifar10-resnet18-sgdm": _row(
        METHODS,
        (96.19, 96.25, 96.29, 96.29, 96.33, 96.37, 96.37),
        (0.07, 0.04, 0.07, 0.10, 0.19, 0.05, 0.05),
        (1.0, 1.08, 1.08, 1.22, 1.22, 1.34, 1.31),
    ),
    "cifar10-resnet18-adamw": _row(
        METHODS,
        (94.54, 94.64, 94.55, 94.73, 94.67, 94.72, 94.95),
        (0.11, 0.09, 0.06, 0.10, 0.18, 0.04, 0.05),
        (1.0, 1.01, 1.01, 1.05, 1.04, 1.12, 1.15),
    ),
    "cifar100-resnet18-sgdm": _row(
        METHODS,
        (78.97, 79.21, 79.20, 79.42, 79.22, 79.83, 79.96),
        (0.22, 0.09, 0.30, 0.25, 0.11, 0.08, 0.10),
        (1.0, 1.08, 1.08, 1.22, 1.23, 1.31, 1.32),
    ),
    "cifar100-resnet18-adamw": _row(
        METHODS,
        (76.09, 76.02, 76.28, 76.32, 76.49, 76.96, 77.07),
        (0.27, 0.31, 0.13, 0.39, 0.06, 0.03, 0.16),
        (1.0, 1.01, 1.01, 1.05, 1.06, 1.13, 1.13),
    ),
    "cifar10-pyramidnet110-sgdm": _row(_THREE, (97.18, 97.26, 97.21), (0.08, 0.04, 0.04), (1.0, 1.41, 1.41)),
    "cifar10-vgg16bn-sgdm": _row(_THREE, (95.10, 95.41, 95.27), (0.06, 0.05, 0.09), (1.0, 1.18, 1.17)),
    "cifar10-wrn28x10-sgdm": _row(_THREE, (96.94, 97.10, 97.04), (0.04, 0.01, 0.04), (1.0, 1.26, 1.26)),
    "cifar100-pyramidnet110-sgdm": _row(_THREE, (83.96, 84.00, 84.40), (0.11, 0.07, 0.21), (1.0, 1.41, 1.41)),
    "cifar100-vgg16bn-sgdm": _row(_THREE, (75.65, 76.31, 76.32), (0.12, 0.05, 0.16), (1.0, 1.19, 1.17)),
    "cifar100-wrn28x10-sgdm": _row(_THREE, (82.50, 82.72, 82.80), (0.08, 0.11, 0.17), (1.0, 1.25, 1.25)),
    "cifar100-resnet18-batch256": _row(
        ("base", "ekfac-ngd", PUBLISHED, "adam", "adafisher", "kfac", "shampoo"),
        (77.52, 78.34, 76.56, 75.74, 77.28, 76.03, 76.78),
        (0.13, 0.08, 0.20, 0.10, 0.20, 0.30, 0.20),
        (1.0, 1.25, 1.0, 1.16, 1.33, 2.32, 10.82),
    ),
    "imagenet-resnet50-sgdm": _row(
        ("base", "kfac-newton", "ekfac-newton", "kfac-ngd", "ekfac-ngd"),
        (77.42, 77.78, 76.93, 77.98, 78.05),
        (0.12, 0.31, 0.95, 0.08, 0.05),
        (1.0, 1.027, 1.032, 1.027, 1.032),
    ),
    "imagenet-resnet50-90epochs": _row(
        ("base", "ekfac-ngd", "adam", "adafisher", "kfac", "shampoo"),
        (77.19, 77.59, 67.78, 76.95, 70.96, 72.82),
        (0.02, 0.04, None, None, None, None),
        (1.0, 1.034, None, None, None, None),
    ),
    "iwslt14-transformer-adamw": _row(("base", "ekfac-ngd"), (34.24, 34.51), (0.12, 0.05), (1.0, 1.16)),
}
