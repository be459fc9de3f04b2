"""Attention of training-time test: a chain sees the step-0 keys of its document up to its anchor, and the later keys of its own.

Chains are laid out in blocks: a few dozen neighbouring chains of each of some documents of similar length, against the keys that the last of them sees. So
nothing is padded more than twofold, about half of a causal square is never computed, and scores exist for one block at a time: the backward
pass forms them again from the log-sum-exp (Dao et al., arXiv 2205.14135).

Shapes: C chains, N packed tokens, G documents of a block, S chains of each, T keys, k key-value heads, g query heads of each, d head size, s own steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_CHAINS = 64
"""Chains of a document in a block."""


@dataclass(frozen=True)
class Block:
    """Chains and tokens of a block, and what each chain does not see. Padded chains repeat a real one; `real_GS` says which are real."""

    chain_GS: Int[Tensor, "G S"]
    real_GS: Bool[Tensor, "G S"]
    token_GT: Int[Tensor, "G T"]
    hidden_GST: Bool[Tensor, "G S T"]


def blocks(lengths: Sequence[int], document_C: Int[Tensor, " C"], place_C: Int[Tensor, " C"]) -> list[Block]:
    """Lay out chains, sorted by (document, place of the anchor), over documents of these lengths."""
    device, found = document_C.device, []
    size, count = torch.tensor(lengths), torch.bincount(document_C.cpu(), minlength=len(lengths))
    start, first = size.cumsum(0) - size, count.cumsum(0) - count
    place = place_C.cpu()
    scale = torch.tensor([n.bit_length() for n in lengths])
    for bits in scale[count > 0].unique().tolist():
        similar = ((scale == bits) & (count > 0)).nonzero()[:, 0]
        for begin in range(0, int(count[similar].max()), BLOCK_CHAINS):
            members = similar[count[similar] > begin]
            slot_S = begin + torch.arange(min(BLOCK_CHAINS, int(count[members].max()) - begin))
            real_GS = slot_S < count[members, None]
            chain_GS = first[members, None] + torch.where(real_GS, slot_S, begin)
            anchor_GS = place[chain_GS]
            place_T = torch.arange(int(anchor_GS.max()) + 1)
            token_GT = torch.where(place_T < size[members, None], start[members, None] + place_T, 0)
            hidden_GST = place_T > anchor_GS[..., None]
            found.append(Block(*(x.to(device) for x in (chain_GS, real_GS, token_GT, hidden_GST))))
    return found


def chain_attention(
    query_Chd: Float[Tensor, "C heads d"],
    key_Nkd: Float[Tensor, "N kv d"],
    value_Nkd: Float[Tensor, "N kv d"],
    own_key_Cskd: Float[Tensor, "C s kv d"],
    own_value_Cskd: Float[Tensor, "C s kv d"],
    layout: Sequence[Block],
) -> Float[Tensor, "C heads d"]:
    """Softmax attention over both kinds of keys. Scores and softmax are float32 (float64 for float64 input)."""
    return _ChainAttention.apply(query_Chd, key_Nkd, value_Nkd, own_key_Cskd, own_value_Cskd, layout)  # type: ignore[no-any-return]


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, layout: Sequence[Block]) -> Tensor:
        query_Ckgd = query.unflatten(1, (key.shape[1], -1)) * query.shape[2] ** -0.5
        exact = torch.promote_types(query.dtype, torch.float32)
        own_Ckgs = torch.einsum("ckgd,cskd->ckgs", query_Ckgd, own_key).to(exact)
        out_Ckgd, norm_Ckg = torch.empty_like(query_Ckgd), query_Ckgd.new_empty(query_Ckgd.shape[:3], dtype=exact)
        for block in layout:
            scores = _scores(query_Ckgd, key, block)
            own = own_Ckgs[block.chain_GS].transpose(1, 2)
            top = scores.amax(-1) if not own.shape[-1] else torch.maximum(scores.amax(-1), own.amax(-1))
            weight, own_weight = scores.sub_(top[..., None]).exp_(), (own - top[..., None]).exp()
            total = weight.sum(-1) + own_weight.sum(-1)
            seen = _rows(weight).to(query.dtype) @ value[block.token_GT].transpose(1, 2)
            own_seen = torch.einsum("GkSgs,GSskd->GkSgd", own_weight.to(query.dtype), own_value[block.chain_GS])
            out = (seen.view_as(own_seen) + own_seen) / total[..., None].to(query.dtype)
            chain = block.chain_GS[block.real_GS]
            out_Ckgd[chain] = out.transpose(1, 2)[block.real_GS]
            norm_Ckg[chain] = (top + total.log()).transpose(1, 2)[block.real_GS]
        ctx.layout = layout
        ctx.save_for_backward(query_Ckgd, key, value, own_key, own_value, own_Ckgs, out_Ckgd, norm_Ckg)
        return out_Ckgd.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_Ckgd, key, value, own_key, own_value, own_Ckgs, out_Ckgd, norm_Ckg = ctx.saved_tensors
        grad_Ckgd, dtype = grads[0].view_as(out_Ckgd), out_Ckgd.dtype
        mean_Ckg = (grad_Ckgd * out_Ckgd).sum(-1).to(norm_Ckg.dtype)
        weight = (own_Ckgs - norm_Ckg[..., None]).exp()
        slope = (weight * (torch.einsum("ckgd,cskd->ckgs", grad_Ckgd, own_value) - mean_Ckg[..., None])).to(dtype)
        grad_query = torch.einsum("ckgs,cskd->ckgd", slope, own_key)
        grad_own_key = torch.einsum("ckgs,ckgd->cskd", slope, query_Ckgd)
        grad_own_value = torch.einsum("ckgs,ckgd->cskd", weight.to(dtype), grad_Ckgd)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for block in ctx.layout:
            unreal = ~block.real_GS[:, None, :, None]
            query = _rows(query_Ckgd[block.chain_GS].transpose(1, 2))
            grad = _rows(grad_Ckgd[block.chain_GS].transpose(1, 2).masked_fill(unreal[..., None], 0.0))
            norm, mean = (x[block.chain_GS].transpose(1, 2) for x in (norm_Ckg, mean_Ckg))
            weight = _rows(_scores(query_Ckgd, key, block).sub_(norm[..., None]).exp_())
            keys, values = (x[block.token_GT].transpose(1, 2) for x in (key, value))
            slope = (grad @ values.transpose(2, 3)).to(weight.dtype).sub_(_rows(mean.masked_fill(unreal, 0.0)[..., None])).mul_(weight).to(dtype)
            real = block.real_GS
            grad_query[block.chain_GS[real]] += (slope @ keys).view_as(query_Ckgd[block.chain_GS].transpose(1, 2)).transpose(1, 2)[real]
            for total, part in ((grad_key, slope.transpose(2, 3) @ query), (grad_value, weight.to(dtype).transpose(2, 3) @ grad)):
                total.index_add_(0, block.token_GT.flatten(), part.transpose(1, 2).flatten(0, 1))
        return (grad_query * query_Ckgd.shape[3] ** -0.5).flatten(1, 2), grad_key, grad_value, grad_own_key, grad_own_value, None


def _scores(query_Ckgd: Tensor, key_Nkd: Tensor, block: Block) -> Tensor:
    """[G, k, S, g, T], -inf where a chain does not see."""
    query = query_Ckgd[block.chain_GS].transpose(1, 2)
    scores = _rows(query) @ key_Nkd[block.token_GT].permute(0, 2, 3, 1)
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return exact.view(*query.shape[:4], -1).masked_fill_(block.hidden_GST[:, None, :, None], -torch.inf)


def _rows(x: Tensor) -> Tensor:
    """[G, k, S, g, …] with the query heads of a chain as rows of their own: [G, k, S x g, …]."""
    return x.flatten(2, 3)
