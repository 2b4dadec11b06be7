"""A small GPT that learns the letters of a text, by AdamW with LLQR around it, and then writes on.

pip install llqr
python gpt.py              # on the source of torch.nn.functional, which is at hand
python gpt.py novel.txt    # on a text of yours
"""

import inspect
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from llqr import LLQR

LENGTH, WIDTH, STEPS, BATCH = 32, 48, 200, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.gather = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attend(self.before(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.gather(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.think(self.after(x))


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1], device=letters.device))
        return self.head(self.blocks(x))


@torch.no_grad()
def write_on(model: GPT, letters: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        chances = model(letters[None, -LENGTH:])[0, -1].softmax(0)
        letters = torch.cat((letters, chances.multinomial(1)))
    return letters


def batch(letters: torch.Tensor, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and the same one letter further."""
    starts = torch.randint(len(letters) - LENGTH, (size,))
    pieces = torch.stack([letters[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else inspect.getsource(functional)
    known = sorted(set(text))
    letters = torch.tensor([known.index(letter) for letter in text])
    learned, held_out = letters[: len(letters) * 9 // 10], letters[len(letters) * 9 // 10 :]
    torch.manual_seed(0)
    model = GPT(len(known))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    optimizer = LLQR(optimizer, model)  # the line that is new
    test = batch(held_out, 64)
    for step in range(STEPS + 1):
        if step % 50 == 0:
            print(f"step {step}: loss a letter on held-out text {loss_of(model, *test).item():.3f}")
        optimizer.zero_grad()
        loss_of(model, *batch(learned)).backward()
        optimizer.step()
    print(optimizer.stats)
    print("".join(known[number] for number in write_on(model, held_out[:LENGTH], 120)))
