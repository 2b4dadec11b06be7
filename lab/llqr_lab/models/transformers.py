"""Transformers: GPT and the one of the grokking task, ViT, and the encoder–decoder for translation."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """softmax(q kᵀ / √(width of a head)) v for each head, with the heads side by side in the last dimension.

    `mask` is True where a place may be looked at, of a shape that broadcasts to (batch, heads, queries, keys).
    """
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))  # type: ignore[no-untyped-call]
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(-2)


def feed_forward(width: int, inner: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))


class Block(nn.Module):
    """x ← x + attention(norm(x)); x ← x + MLP(norm(x)), with a GELU MLP four times as wide. Dropout is on the weights of the
    attention and on what both send on."""

    def __init__(self, width: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads, self.causal = heads, causal
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feed_forward(width, 4 * width, nn.GELU())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        rate = self.dropout.p if self.training else 0.0
        x = x + self.dropout(self.out(attend(q, k, v, self.heads, causal=self.causal, dropout=rate)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))  # type: ignore[no-any-return]


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"a width of {width} can't be shared by {heads} heads")


def without_biases(model: nn.Module) -> None:
    """Biases of linear layers begin as zeros."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


# transformers that look back only

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
        start: str | float = "torch",
        reads: str = "last",
    ) -> None:
        super().__init__(words, length, width, heads, layers, 0.0, bias=True)
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

    The head is the embedding's matrix. Weights begin as N(0, 0.02²), and those that are added to the residual
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
    ) -> None:
        super().__init__(words, length, width, heads, layers, dropout, bias=False)
        self.head.weight = self.embed.weight
        without_biases(self)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                added = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 * (2 * layers) ** -0.5 if added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(tokens)))  # type: ignore[no-any-return]


# Dosovitskiy et al. 2021


class ViT(nn.Module):
    """Patches as words: a linear map of each patch, learned positions, blocks, a LayerNorm, and a linear classifier that reads
    a word of its own, put before the patches. The defaults are ViT-Ti/4 for 32 × 32 pictures."""

    def __init__(
        self, classes: int = 10, picture: int = 32, patch: int = 4, width: int = 192, heads: int = 3, layers: int = 12
    ) -> None:
        super().__init__()
        if picture % patch:
            raise ValueError(f"pictures of side {picture} can't be cut into patches of side {patch}")
        places = (picture // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_word = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.02 * torch.randn(places, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        # N(0, 0.02²) cut off at two standard deviations; patches keep their variance: N(0, 1 / numbers of a patch)
        without_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
        nn.init.normal_(self.patches.weight, std=self.patches.weight[0].numel() ** -0.5)
        nn.init.zeros_(cast(Tensor, self.patches.bias))

    def forward(self, x: Tensor) -> Tensor:
        words = self.patches(x).flatten(2).transpose(1, 2)
        words = torch.cat((self.class_word.expand(len(x), 1, -1), words), 1)
        hidden = self.norm(self.blocks(words + self.position))
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]


# Vaswani et al. 2017, in the size and form that is usual for IWSLT'14 (transformer_iwslt_de_en)


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
        dropout: float = 0.3,
        pad: int = 1,
    ) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"the width is even, for a sine and a cosine of each frequency, not {width}")
        self.pad = pad
        sizes = (width, ffn, heads, dropout)
        self.encoder = nn.ModuleList(Layer(*sizes, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(*sizes, decoder=True) for _ in range(layers))
        # Xavier's uniform weights, with query, key and value as one matrix of 3d × d: a gain of 1/√2 for each alone
        without_biases(self)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                one_of_three = name.endswith(("query", "key", "value"))
                nn.init.xavier_uniform_(module.weight, gain=0.5**0.5 if one_of_three else 1.0)
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
