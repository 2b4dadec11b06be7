"""A convnet on scikit-learn's digits, on several processes, with LLQR around SGD. One line is new, and an entry in checkpoints.

pip install llqr scikit-learn
torchrun --nproc-per-node 2 ddp.py            # and once more with --resume, after it was stopped; with another number, too
torchrun --nproc-per-node 2 ddp.py --fsdp     # sharded by fully_shard, in place of DDP
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from llqr import LLQR

WHOLE = state_dict.StateDictOptions(full_state_dict=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))


def data() -> tuple[TensorDataset, TensorDataset]:
    pictures, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    x, y = held_out.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def save(file: Path, model: nn.Module, optimizer: LLQR) -> None:
    """On every rank; the first one writes."""
    state = {
        "model": state_dict.get_model_state_dict(model, options=WHOLE),
        "base": state_dict.get_optimizer_state_dict(model, optimizer.base, options=WHOLE),
        "llqr": optimizer.state_dict()["llqr"],
    }
    if dist.get_rank() == 0:
        torch.save(state, file)


def load(file: Path, model: nn.Module, optimizer: LLQR) -> None:
    state = torch.load(file, weights_only=True)
    state_dict.set_model_state_dict(model, state["model"], options=WHOLE)
    state_dict.set_optimizer_state_dict(model, optimizer.base, state["base"], options=WHOLE)
    optimizer.load_state_dict({**optimizer.base.state_dict(), "llqr": state["llqr"]})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--folder", type=Path, default=Path("digits"), help="where checkpoints go")
    options.add_argument("--resume", action="store_true")
    options.add_argument("--fsdp", action="store_true")
    chosen = options.parse_args()

    dist.init_process_group("gloo")  # "nccl", with models and batches on torch.cuda.current_device()
    training, held_out = data()
    sampler = DistributedSampler(training, seed=0)
    loader = DataLoader(training, batch_size=64 // dist.get_world_size(), sampler=sampler)
    model = network()
    called = fully_shard(model) if chosen.fsdp else DistributedDataParallel(model)

    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = LLQR(base, called)  # the line that is new

    chosen.folder.mkdir(parents=True, exist_ok=True)
    saved = sorted(chosen.folder.glob("*.pt")) if chosen.resume else []
    if saved:
        load(saved[-1], model, optimizer)
    for epoch in range(len(saved), chosen.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
        right = accuracy(called, held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {right:.3f}, {optimizer.stats.refits} refits", flush=True)
        save(chosen.folder / f"{epoch:03d}.pt", model, optimizer)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
