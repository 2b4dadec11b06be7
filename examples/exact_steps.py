"""Exact second-order steps on a small network: natural gradient by Riccati recursion along its layers, beside gradient descent.

pip install llqr scikit-learn
python exact_steps.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from llqr import dense_step, exact_step
from llqr.divergences import KL

STEPS, DAMPING = 10, 1e-2


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """48 digits, their pictures averaged down to 4 × 4 pixels."""
    pictures, labels = load_digits(return_X_y=True)
    inputs = functional.avg_pool2d(torch.tensor(pictures[:48] / 16).reshape(-1, 1, 8, 8), 2).flatten(1)
    return inputs, torch.tensor(labels[:48])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)).double()


def exact(model: nn.Sequential, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """-(H + λ)⁻¹ g with H the Fisher matrix, by name of the parameter."""
    return exact_step(model, inputs, targets, nn.CrossEntropyLoss(), KL(), damping=DAMPING)


def descent(model: nn.Sequential, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """-η g, with an η that is rather too large."""
    gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), list(model.parameters()))
    return {name: -8.0 * g for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}


@torch.no_grad()
def take(model: nn.Sequential, step: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Go the whole step, or half of it, or a quarter, …, until the loss is lower than before; the loss there."""
    before, length = functional.cross_entropy(model(inputs), targets), 1.0
    for key, change in step.items():
        model.get_parameter(key).add_(change)
    while (loss := functional.cross_entropy(model(inputs), targets)) > before and length > 1e-6:
        length /= 2
        for key, change in step.items():
            model.get_parameter(key).sub_(length * change)
    return loss.item()


if __name__ == "__main__":
    inputs, targets = data()
    for name, step_of in (("gradient descent", descent), ("exact steps", exact)):
        model = network()
        losses = [functional.cross_entropy(model(inputs), targets).item()]
        losses += [take(model, step_of(model, inputs, targets), inputs, targets) for _ in range(STEPS)]
        print(f"{name}: loss " + " ".join(f"{loss:.4f}" for loss in losses))

    # the recursion never forms H; the dense solve does, and knows nothing of layers
    model = network()
    dense = dense_step(model, inputs, targets, nn.CrossEntropyLoss(), KL(), damping=DAMPING)
    pairs = [(exact(model, inputs, targets)[key], step) for key, step in dense.items()]
    difference = sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)
    print(f"relative difference from the dense solve: {difference.sqrt().item():.1e}")
