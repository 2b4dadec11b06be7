"""Embeddings by operations that can be differentiated twice, and what a forward pass of one changes.

Torch's `embedding_bag` has no second derivative and no forward mode, and sparse gradients can't be differentiated: both are
plain operations here. `max_norm` renormalises the weights that are looked up, in place, so those are handed over as copies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional

Maybe = Tensor | None


def constants(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a forward pass may write to: buffers, and weights that it renormalises. Parameters to step that are among
    those are handed over as copies of their own."""
    named = dict(model.named_parameters())
    written = {name: named[name] for name in renormalised(model)}
    return {name: tensor.detach().clone() for name, tensor in {**dict(model.named_buffers()), **written}.items()}


def renormalised(model: nn.Module) -> list[str]:
    """The names of the weights that a forward pass renormalises in place."""
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = {id(module.weight) for module in embeddings if module.max_norm is not None}
    return [name for name, parameter in model.named_parameters() if id(parameter) in weights]


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Maybe:
    """With a dense gradient, where it would be sparse; and with a padding that has no derivative, forward neither."""
    if padding_idx is not None and isinstance(unpack_dual(weight).tangent, Tensor):  # type: ignore[no-untyped-call]
        rows = functional.embedding(input, weight, padding_idx, max_norm, norm_type)
        return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)
    if not sparse:
        return None
    return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Maybe = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Maybe = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Maybe:
    """Looked up, then added up bag by bag."""
    if scale_grad_by_freq or input.is_floating_point() or (input.dim() == 1) != (offsets is not None):
        return None  # what isn't a derivative, or a mistake: torch says which
    words, bags, count = _bags(input, offsets, include_last_offset)
    scales = None if per_sample_weights is None else per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        kept = words != padding_idx % len(weight)
        words, bags, scales = words[kept], bags[kept], None if scales is None else scales[kept]
    rows = functional.embedding(words, weight, None, max_norm, norm_type)
    if scales is not None:
        rows = rows * scales
    empty = rows.new_zeros(count, rows.shape[1])
    if mode == "max":
        top = empty.scatter_reduce(0, bags[:, None].expand_as(rows), rows, "amax", include_self=False)
        return top.clone()  # its derivative reads it, and what follows may change it in place
    total = empty.index_add(0, bags, rows)
    return total if mode == "sum" else total / torch.bincount(bags, minlength=count).clamp(min=1)[:, None]


def _bags(input: Tensor, offsets: Maybe, include_last_offset: bool) -> tuple[Tensor, Tensor, int]:
    """The words in a row, the bag that each is in, and the number of bags."""
    if offsets is None:
        count, length = input.shape
        return input.reshape(-1), torch.arange(count, device=input.device).repeat_interleave(length), count
    starts = offsets[:-1] if include_last_offset else offsets
    lengths = torch.diff(starts, append=starts.new_tensor([len(input)]))
    return input, torch.arange(len(starts), device=input.device).repeat_interleave(lengths), len(starts)
