"""A transformer that translates numbers from German letters to English words, by AdamW with LLQR around it.

German says 743 as "siebenhundertdreiundvierzig", the ones before the tens. Numbers are padded to one length; the loss
ignores the padding, and so does the curvature, which is seen in the loss's own backward pass.

pip install llqr
python translation.py
"""

import torch
from torch import nn
from torch.nn import functional

from llqr import LLQR

STEPS, BATCH, WIDTH = 120, 32, 48
ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += [f"{name}teen" for name in ["thir", "four", "fif", "six", "seven", "eigh", "nine"]]
TENS = [f"{name}ty" for name in ["twen", "thir", "for", "fif", "six", "seven", "eigh", "nine"]]
EINER = ["null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
EINER += [f"{name}zehn" for name in ["drei", "vier", "fünf", "sech", "sieb", "acht", "neun"]]
ZEHNER = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def english(n: int) -> list[str]:
    if n >= 100:
        return [ONES[n // 100], "hundred", *(english(n % 100) if n % 100 else [])]
    return [ONES[n]] if n < 20 else [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]


def german(n: int) -> str:
    if n >= 100:
        return EINER[n // 100] + "hundert" + (german(n % 100) if n % 100 else "")
    return EINER[n] if n < 20 else (EINER[n % 10] + "und" if n % 10 else "") + ZEHNER[n // 10 - 2]


LETTERS = ["<pad>", *sorted(set("".join(map(german, range(1000)))))]
WORDS = ["<pad>", "<begin>", "<end>", *ONES, *TENS, "hundred"]


def pairs(numbers: list[int]) -> list[torch.Tensor]:
    sources = [torch.tensor([LETTERS.index(letter) for letter in german(n)]) for n in numbers]
    targets = [torch.tensor([1, *(WORDS.index(word) for word in english(n)), 2]) for n in numbers]
    return [nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (sources, targets)]


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.words = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(len(WORDS), WIDTH)
        self.places, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, len(WORDS))
        self.net = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = (words + self.places.weight[: words.shape[1]] for words in (self.letters(source), self.words(target)))
        later, nothing = torch.ones(y.shape[1], y.shape[1]).triu(1) > 0, source == 0
        return self.head(self.net(x, y, tgt_mask=later, src_key_padding_mask=nothing, memory_key_padding_mask=nothing))


@torch.no_grad()
def right(model: Translator, numbers: list[int]) -> float:
    source, target = pairs(numbers)
    written = torch.ones(len(numbers), 1, dtype=torch.long)
    for _ in range(target.shape[1] - 1):
        written = torch.cat((written, model(source, written)[:, -1].argmax(1, keepdim=True)), dim=1)
    return ((written == target) | (target == 0)).all(1).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    numbers = torch.randperm(1000).tolist()
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    optimizer = LLQR(optimizer, model)  # the line that is new
    for step in range(STEPS + 1):
        source, target = pairs([numbers[i] for i in torch.randint(900, (BATCH,))])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), target[:, 1:], ignore_index=0)
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}, right on numbers never seen {right(model, numbers[900:]):.2f}")
