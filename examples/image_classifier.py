"""A small convnet on scikit-learn's digits: SGD with momentum alone, and with LLQR around it.

pip install llqr scikit-learn
python image_classifier.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from llqr import LLQR

EPOCHS, BATCH = 12, 64


def data() -> tuple[torch.Tensor, ...]:
    """1,500 pictures of 8 × 8 pixels to learn from, the rest to test on."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(pictures / 16).float().reshape(-1, 1, 8, 8)[order]
    targets = torch.tensor(labels)[order]
    return inputs[:1500], targets[:1500], inputs[1500:], targets[1500:]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(targets), generator=shuffle).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def score(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    output = model(inputs)
    return functional.cross_entropy(output, targets).item(), (output.argmax(1) == targets).float().mean().item()


if __name__ == "__main__":
    train_inputs, train_targets, test_inputs, test_targets = data()
    for name in ("SGDM", "SGDM with LLQR"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if name == "SGDM with LLQR":
            optimizer = LLQR(optimizer, model)  # the line that is new
        before, _ = score(model, train_inputs, train_targets)
        train(model, optimizer, train_inputs, train_targets)
        after, _ = score(model, train_inputs, train_targets)
        _, accuracy = score(model, test_inputs, test_targets)
        print(f"{name}: training loss {before:.3f} -> {after:.3f}, test accuracy {accuracy:.3f}")
    print(optimizer.stats)
