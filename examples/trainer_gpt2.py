"""GPT-2 by transformers.Trainer, with LLQR around AdamW. The optimizer and the line that logs its stats are all that is new.

pip install "llqr[frameworks]"
python trainer_gpt2.py            # and once more with --resume, after it was stopped
"""

import argparse
import random

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from llqr import LLQR

ALPHABET = "\n 0123456789+=."
LENGTH = 32


class Sums(Dataset):
    """Lines such as "17+5=22." as characters, in blocks."""

    def __init__(self, blocks: int, seed: int) -> None:
        draw = random.Random(seed)
        pairs = [(draw.randrange(20), draw.randrange(20)) for _ in range(blocks * LENGTH // 6)]
        text = "\n".join(f"{a}+{b}={a + b}." for a, b in pairs)[: blocks * LENGTH]
        self.rows = torch.tensor([ALPHABET.index(character) for character in text]).reshape(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class LoggingTrainer(Trainer):
    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        super().log({**logs, **self.llqr.stats.as_logs()}, *args, **kwargs)


def build(folder: str, steps: int = 200, every: int | None = None, **arguments) -> LoggingTrainer:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    optimizer = LLQR(optimizer, model, every=every)  # the line that is new
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "logging_steps": 10,
        "save_steps": 50,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    trainer = LoggingTrainer(
        model,
        TrainingArguments(**{**settings, **arguments}),
        train_dataset=Sums(512, seed=0),
        optimizers=(optimizer, None),
    )
    trainer.llqr = optimizer  # for the logs
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="gpt2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    trainer = build(given.folder, given.steps)
    trainer.train(resume_from_checkpoint=given.resume)
    print(trainer.llqr)
