"""A vision transformer on digits by Lightning, with LLQR around AdamW. The optimizer and the line that logs its stats are new.

pip install "llqr[frameworks]" scikit-learn
python lightning_vit.py            # and once more with --resume, after it was stopped
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from llqr import LLQR


class Digits(lightning.LightningModule):
    def __init__(self, every: int | None = None, batch_size: int = 64) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=10,
        )
        self.net = ViTForImageClassification(config)
        self.every, self.batch_size = every, batch_size

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self.net(pictures).logits, labels, label_smoothing=0.05)
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(optimizer.stats.as_logs())

    def train_dataloader(self) -> DataLoader:
        return data(self.batch_size, self.trainer.world_size, self.trainer.global_rank)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        optimizer = LLQR(optimizer, self.net, every=self.every)  # the line that is new
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def data(batch_size: int = 64, ranks: int = 1, rank: int = 0) -> DataLoader:
    pictures, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pictures / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels))
    # Lightning saves no random state; this sampler's order is that of its epoch, before a stop and after it.
    sampler = DistributedSampler(digits, num_replicas=ranks, rank=rank)
    return DataLoader(digits, batch_size, sampler=sampler, drop_last=True)


def build(folder: str, epochs: int = 20, **settings) -> lightning.Trainer:
    return lightning.Trainer(
        **{
            "max_epochs": epochs,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "logger": CSVLogger(folder, name=None, version=0),
            "callbacks": [ModelCheckpoint(folder, save_last=True)],
            "log_every_n_steps": 5,
            **settings,
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="vit")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed")
    parser.add_argument("--devices", type=int, default=1, help="processes, or GPUs where there are some")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    lightning.seed_everything(0)
    strategy = "ddp" if given.devices > 1 else "auto"
    trainer = build(given.folder, given.epochs, precision=given.precision, devices=given.devices, strategy=strategy)
    trainer.fit(Digits(), ckpt_path="last" if given.resume else None)
    print(trainer.optimizers[0])
