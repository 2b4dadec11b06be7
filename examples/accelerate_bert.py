"""BERT by accelerate, with LLQR around AdamW. The optimizer and the line that logs its stats are all that is new.

pip install "llqr[frameworks]" tensorboard
python accelerate_bert.py            # and once more with --resume, after it was stopped
"""

import argparse
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from llqr import LLQR

THINGS, KIND, UNKIND = ["film", "book", "meal", "song"], ["good", "fine", "lovely"], ["bad", "dull", "awful"]
WORDS = ["<pad>", "the", "was", "not", "and", *THINGS, *KIND, *UNKIND]


def reviews(count: int, seed: int) -> list[tuple[list[int], int]]:
    """ "the film was not dull and lovely": how kind it is, word by word of it."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        words, kindness = ["the", draw.choice(THINGS), "was"], 0
        for number in range(draw.choice([1, 3])):
            negated, kind = draw.random() < 0.5, draw.random() < 0.5
            words += ["and"] * (number > 0) + ["not"] * negated + [draw.choice(KIND if kind else UNKIND)]
            kindness += 1 if kind != negated else -1
        made.append(([WORDS.index(word) for word in words], int(kindness > 0)))
    return made


def collate(rows: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    longest = max(len(words) for words, _ in rows)
    padded = torch.tensor([words + [0] * (longest - len(words)) for words, _ in rows])
    return {
        "input_ids": padded,
        "attention_mask": (padded > 0).long(),
        "labels": torch.tensor([kind for _, kind in rows]),
    }


def train(folder: str, epochs: int = 10, every: int | None = None, resume: bool = False, **settings) -> tuple:
    set_seed(0)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # a function of the epoch, before a stop and after it
    accelerator = Accelerator(
        **{
            "gradient_accumulation_steps": 2,
            "log_with": "tensorboard",
            "project_dir": folder,
            "dataloader_config": order,
            **settings,
        }
    )
    accelerator.init_trackers("logs")
    loader = DataLoader(reviews(1024, seed=0), 32, shuffle=True, collate_fn=collate, drop_last=True)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = llqr = LLQR(optimizer, model, every=every)  # the line that is new
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, epochs * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    saved = sorted(Path(folder).glob("epoch_*")) if resume else []
    if saved:
        accelerator.load_state(saved[-1])
    for epoch in range(len(saved), epochs):
        total = 0.0
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item() / len(loader)
        accelerator.log({"loss": total, **llqr.stats.as_logs()}, step=epoch)
        accelerator.print(f"epoch {epoch}: loss {total:.4f}, {llqr.stats.refits} refits")
        accelerator.save_state(Path(folder) / f"epoch_{epoch:03d}")
    accelerator.end_training()
    return accelerator.unwrap_model(model), llqr


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="bert")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", default="no", help="such as bf16")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    print(train(given.folder, given.epochs, resume=given.resume, mixed_precision=given.precision)[1])
