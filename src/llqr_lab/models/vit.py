"""Vision transformers (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from llqr_lab.models.transformer import Block, without_biases


class ViT(nn.Module):
    """Patches as words: a linear map of each patch, learned positions, blocks, a LayerNorm, and a linear classifier.

    The classifier reads a word of its own that is put before the patches (pooling "class", as in the paper), or the mean over
    the patches (pooling "mean"). The defaults are ViT-Ti/4 for 32 × 32 pictures. S has width 384 and 6 heads, B 768 and 12.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        picture: int = 32,
        patch: int = 4,
        width: int = 192,
        heads: int = 3,
        layers: int = 12,
        dropout: float = 0.0,
        pooling: Literal["class", "mean"] = "class",
    ) -> None:
        super().__init__()
        if picture % patch:
            raise ValueError(f"pictures of side {picture} can't be cut into patches of side {patch}")
        if pooling not in ("class", "mean"):
            raise ValueError(f"pooling is 'class' or 'mean', not {pooling!r}")
        places = (picture // patch) ** 2 + (pooling == "class")
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_word = nn.Parameter(torch.zeros(width)) if pooling == "class" else None
        self.position = nn.Parameter(0.02 * torch.randn(places, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False, dropout=dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        words = self.patches(x).flatten(2).transpose(1, 2)
        if self.class_word is not None:
            words = torch.cat((self.class_word.expand(len(x), 1, -1), words), 1)
        hidden = self.norm(self.blocks(self.dropout(words + self.position)))
        return self.head(hidden.mean(1) if self.class_word is None else hidden[:, 0])  # type: ignore[no-any-return]

    def _initialise(self) -> None:
        """N(0, 0.02²) cut off at two standard deviations; patches keep their variance: N(0, 1 / numbers of a patch)."""
        without_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
        nn.init.normal_(self.patches.weight, std=self.patches.weight[0].numel() ** -0.5)
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)
