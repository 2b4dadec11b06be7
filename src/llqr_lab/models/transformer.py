"""What the transformers share: attention with several heads, and the block of GPT and ViT."""

from __future__ import annotations

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
    """Two linear layers, applied to every place by itself."""
    return nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))


class Block(nn.Module):
    """x ← x + attention(norm(x)); x ← x + MLP(norm(x)), with a GELU MLP four times as wide.

    Dropout is on the weights of the attention and on what both send on.
    """

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
