"""The encoder–decoder of Vaswani et al. 2017, in the size and form that is usual for IWSLT'14 (transformer_iwslt_de_en)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from llqr_lab.models.transformer import attend, check_heads, feed_forward, without_biases


class Attention(nn.Module):
    """What `x` asks for in `source`, by heads: out(attend(query(x), key(source), value(source)))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        mixed = attend(self.query(x), self.key(source), self.value(source), self.heads, mask, causal)
        return self.out(mixed)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention to itself, attention to the memory (in the decoder), and a ReLU MLP: each as x ← norm(x + dropout(f(x)))."""

    def __init__(self, width: int, ffn: int, heads: int, dropout: float, decoder: bool) -> None:
        super().__init__()
        self.attention, self.norm_attention = Attention(width, heads), nn.LayerNorm(width)
        self.decoder = decoder
        if decoder:
            self.cross, self.norm_cross = Attention(width, heads), nn.LayerNorm(width)
        self.mlp, self.norm_mlp = feed_forward(width, ffn, nn.ReLU()), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None, real: Tensor) -> Tensor:
        """`real` is where the source has words. A decoder looks back only, so that padding behind its words isn't seen."""
        mask = None if self.decoder else real
        x = self.norm_attention(x + self.dropout(self.attention(x, x, mask, causal=self.decoder)))
        if self.decoder:
            x = self.norm_cross(x + self.dropout(self.cross(x, memory, real)))
        return self.norm_mlp(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """√d · E[word] + P[place], with dropout; E begins as N(0, 1/d), and as zero for the word of padding."""

    def __init__(self, words: int, width: int, pad: int, dropout: float) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(words, width, padding_idx=pad), math.sqrt(width)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        with torch.no_grad():
            self.table.weight[pad] = 0.0
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.scale * self.table(tokens)
        return self.dropout(words + positions(tokens.shape[1], words))  # type: ignore[no-any-return]


def positions(places: int, like: Tensor) -> Tensor:
    """P[t] = (sin(t ω), cos(t ω)) with d/2 frequencies ω from 1 down to 1/10000, evenly spaced by their logarithms."""
    count = like.shape[-1] // 2
    steps = torch.arange(count, device=like.device, dtype=torch.float64) / max(count - 1, 1)
    angles = torch.arange(places, device=like.device, dtype=torch.float64)[:, None] * 10000.0**-steps
    return torch.cat((angles.sin(), angles.cos()), 1).to(like.dtype)


class TranslationTransformer(nn.Module):
    """Source words (B, S) and target words so far (B, T) in, the logits of what follows each target word (B, T, words) out.

    `pad` fills sentences up behind their words, on both sides, and changes nothing about these. The decoder's words share
    their matrix with the output layer. The numbers of words are those of the usual 10k byte-pair codes.
    """

    def __init__(
        self,
        source_words: int = 8848,
        target_words: int = 6632,
        width: int = 512,
        ffn: int = 1024,
        heads: int = 4,
        layers: int = 6,
        decoder_layers: int | None = None,
        dropout: float = 0.3,
        pad: int = 1,
    ) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"the width is even, for a sine and a cosine of each frequency, not {width}")
        self.pad = pad
        sizes = (width, ffn, heads, dropout)
        self.encoder = nn.ModuleList(Layer(*sizes, decoder=False) for _ in range(layers))
        count = layers if decoder_layers is None else decoder_layers
        self.decoder = nn.ModuleList(Layer(*sizes, decoder=True) for _ in range(count))
        self._initialise()
        self.source = Words(source_words, width, pad, dropout)
        self.target = Words(target_words, width, pad, dropout)
        self.head = nn.Linear(width, target_words, bias=False)
        self.head.weight = self.target.table.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        """The memory: (B, S, width). What it has where the source is padding is never looked at."""
        x, real = self.source(source), self._real(source)
        for layer in self.encoder:
            x = layer(x, None, real)
        return x  # type: ignore[no-any-return]

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """The logits of what follows each word of `target`; `source` says where the memory is padding."""
        x, real = self.target(target), self._real(source)
        for layer in self.decoder:
            x = layer(x, memory, real)
        return self.head(x)  # type: ignore[no-any-return]

    def _real(self, source: Tensor) -> Tensor:
        """Where there are words: (B, 1, 1, S). The first place always counts, so that a row of padding alone has a softmax."""
        real = source != self.pad
        real[:, 0] = True
        return real[:, None, None, :]

    def _initialise(self) -> None:
        """Xavier's uniform weights, with query, key and value as one matrix of 3d × d: a gain of 1/√2 for each alone."""
        without_biases(self)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                one_of_three = name.endswith(("query", "key", "value"))
                nn.init.xavier_uniform_(module.weight, gain=0.5**0.5 if one_of_three else 1.0)
