"""Transformers that look back only: the one of the grokking task, and a small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llqr_lab.models.transformer import Block, without_biases

CUT_DEVIATION = 0.87962566
"""Of the standard normal distribution without what is beyond ±2."""


class CausalTransformer(nn.Module):
    """Words (times `scale`) and learned positions, blocks whose attention looks back only, a LayerNorm, and a linear layer to
    the logits."""

    def __init__(
        self, words: int, length: int, width: int, heads: int, layers: int, dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout=dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=bias)

    scale = 1.0

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the blocks make of tokens (batch, places): (batch, places, width)."""
        places = tokens.shape[1]
        if places > len(self.position):
            raise ValueError(f"{places} tokens in a row, and the model has positions for {len(self.position)}")
        return self.blocks(self.dropout(self.scale * self.embed(tokens) + self.position[:places]))  # type: ignore[no-any-return]


class GrokkingTransformer(CausalTransformer):
    """Tokens in, the logits of what follows the last one out (as for a ∘ b = ?), as in Power et al. 2022.

    The words are the p elements that ∘ works on and the two signs ∘ and =; p is 97 by default. `reads` is what the last layer
    is given: the "last" place, or "all" of them side by side. `start` is how weights begin:

    - "torch": by torch's defaults, with positions from N(0, 0.02²);
    - "lecun": from N(0, 1/inputs), cut off at two deviations, positions from N(0, 1), embeddings from N(0, 1/width) and times
      √width wherever they are read, biases zero;
    - a number s: from N(0, s²), biases zero. The smaller, the sooner it generalises: without weight decay, on subtraction, 0.02
      and 0.03 gave no plateau at all in trials, and 0.04 one of more than a thousand steps.
    """

    one_output = True
    """For the whole sequence."""

    def __init__(
        self,
        words: int = 99,
        length: int = 4,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        start: str | float = "torch",
        reads: str = "last",
    ) -> None:
        super().__init__(words, length, width, heads, layers, dropout, bias=True)
        if reads not in ("last", "all"):
            raise ValueError(f"'reads' is last or all, not {reads!r}")
        self.reads = reads
        if reads == "all":
            self.norm, self.head = nn.LayerNorm(length * width), nn.Linear(length * width, words)
        if start == "torch":
            return
        without_biases(self)
        if start == "lecun":
            self.scale = width**0.5
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    cut = 2 / (CUT_DEVIATION * module.in_features**0.5)
                    nn.init.trunc_normal_(module.weight, std=cut / 2, a=-cut, b=cut)
            nn.init.normal_(self.position)
            nn.init.normal_(self.embed.weight, std=width**-0.5)
        elif isinstance(start, float) and start > 0:
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=start)
        else:
            raise ValueError(f"'start' is torch, lecun, or a deviation above 0, not {start!r}")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        return self.head(self.norm(hidden.flatten(1) if self.reads == "all" else hidden[:, -1]))  # type: ignore[no-any-return]


class GPT(CausalTransformer):
    """Tokens (batch, places) in, the logits of what follows each one (batch, places, words) out, as in Radford et al. 2019.

    With `tied` the head is the embedding's matrix. Weights begin as N(0, 0.02²), and those that are added to the residual
    stream as N(0, 0.02² / (2 · layers)), so that its variance doesn't grow with the depth. 65 words are the characters of
    Shakespeare's plays.
    """

    def __init__(
        self,
        words: int = 65,
        length: int = 256,
        width: int = 384,
        heads: int = 6,
        layers: int = 6,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__(words, length, width, heads, layers, dropout, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        without_biases(self)
        added = [name for name, _ in self.named_parameters() if name.endswith(("out.weight", "mlp.2.weight"))]
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 * (2 * layers) ** -0.5 if name in added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(tokens)))  # type: ignore[no-any-return]
