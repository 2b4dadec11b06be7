"""A network that predicts a number and how sure it is of it, by SGD with LLQR around it and a divergence written here.

The outputs are the mean and the log of the standard deviation of a Gaussian. A step is measured by the KL between two such
Gaussians, which the library doesn't have; docs/guides/own-divergence.md says what it takes to write one.

pip install llqr scikit-learn
python own_divergence.py
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from llqr import LLQR
from llqr.divergences import BasePoint, OutputTerm


class GaussianKL(OutputTerm):
    """KL(p_k ‖ p) = log σ/σ_k + (σ_k² + (μ_k - μ)²) / 2σ² - ½, averaged over the batch."""

    needs_loss = False

    def psi(self, output: torch.Tensor, base: BasePoint) -> torch.Tensor:
        (mean, log), (mean_k, log_k) = output.unbind(1), base.output.unbind(1)
        return (log - log_k + ((2 * log_k).exp() + (mean_k - mean) ** 2) / (2 * (2 * log).exp()) - 0.5).mean()


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p(target), but for a constant."""
    mean, log = output.unbind(1)
    return (log + (targets - mean) ** 2 / (2 * (2 * log).exp())).mean()


def data() -> tuple[torch.Tensor, ...]:
    """Ten measurements of 442 patients, and how far diabetes had come a year later; 342 to learn from."""
    inputs, targets = (torch.tensor(numbers).float() for numbers in load_diabetes(return_X_y=True))
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    inputs, targets = (inputs / inputs.std(0))[order], ((targets - targets.mean()) / targets.std())[order]
    return inputs[:342], targets[:342], inputs[342:], targets[342:]


if __name__ == "__main__":
    train_inputs, train_targets, test_inputs, test_targets = data()
    for name in ("SGD", "SGD with LLQR"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        if name == "SGD with LLQR":
            optimizer = LLQR(optimizer, model, GaussianKL())
        before = loss_fn(model(test_inputs), test_targets).item()
        for _ in range(150):
            rows = torch.randint(len(train_targets), (64,))
            optimizer.zero_grad()
            loss_fn(model(train_inputs[rows]), train_targets[rows]).backward()
            optimizer.step()
        output = model(test_inputs).detach()
        inside = ((test_targets - output[:, 0]).abs() < output[:, 1].exp()).float().mean().item()
        after = loss_fn(output, test_targets).item()
        print(
            f"{name}: test loss {before:.3f} -> {after:.3f}, {inside:.2f} of targets within one deviation (should be 0.68)"
        )
    print(optimizer.stats)
