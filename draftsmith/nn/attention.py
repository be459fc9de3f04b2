"""Attention of training-time-test chains, and the key-value cache of drafting.

A chain sees the step-0 keys of its document up to its anchor, and the later keys of its own. Chains of one document share its keys, so the
work is grouped per document: [documents, slots, T] scores, never [chains, N] over the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Packed tokens laid out as documents x places, for products per document."""

    token_GT: Int[Tensor, "G T"]
    """Packed index of every place; places past a document's end repeat token 0 and are never seen."""

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> Grid:
        """Lay out documents of these lengths."""
        size = torch.tensor(lengths, device=device)
        start = size.cumsum(0) - size
        place = torch.arange(max(lengths), device=device)
        return Grid(torch.where(place < size[:, None], start[:, None] + place, 0))


def chain_attention(
    query_CHd: Float[Tensor, "C heads d"],
    prefix_key_GTkd: Float[Tensor, "G T kv d"],
    prefix_value_GTkd: Float[Tensor, "G T kv d"],
    own_key_CSkd: Float[Tensor, "C S kv d"],
    own_value_CSkd: Float[Tensor, "C S kv d"],
    document_C: Int[Tensor, " C"],
    anchor_C: Int[Tensor, " C"],
) -> Float[Tensor, "C heads d"]:
    """Softmax attention over step-0 keys at places <= anchor of the chain's document and the S keys of the chain itself.

    Chains are sorted by document. Scores and softmax are float32 (float64 for float64 input).
    """
    chains, heads, dim = query_CHd.shape
    documents, _, kv, _ = prefix_key_GTkd.shape
    group = heads // kv
    counts = torch.bincount(document_C, minlength=documents)
    slot_C = torch.arange(chains, device=query_CHd.device) - (counts.cumsum(0) - counts)[document_C]
    slots = int(counts.max())
    exact = torch.promote_types(query_CHd.dtype, torch.float32)

    query_Ckgd = query_CHd.reshape(chains, kv, group, dim) * dim**-0.5
    grid_GSkgd = query_Ckgd.new_zeros(documents, slots, kv, group, dim).index_put((document_C, slot_C), query_Ckgd)
    rows_GkRd = grid_GSkgd.permute(0, 2, 1, 3, 4).reshape(documents, kv, slots * group, dim)
    prefix_GkRT = rows_GkRd @ prefix_key_GTkd.permute(0, 2, 3, 1)
    place_T = torch.arange(prefix_key_GTkd.shape[1], device=query_CHd.device)
    anchor_GS = anchor_C.new_full((documents, slots), -1).index_put((document_C, slot_C), anchor_C)
    hidden_GRT = (place_T > anchor_GS[..., None]).repeat_interleave(group, dim=1)
    prefix_GkRT = prefix_GkRT.to(exact).masked_fill(hidden_GRT[:, None], -torch.inf)
    steps = own_key_CSkd.shape[1]
    own_CkgS = torch.einsum("ckgd,cskd->ckgs", query_Ckgd, own_key_CSkd).to(exact)
    own_GSkgS = own_CkgS.new_zeros(documents, slots, kv, group, steps).index_put((document_C, slot_C), own_CkgS)
    own_GkRS = own_GSkgS.permute(0, 2, 1, 3, 4).reshape(documents, kv, slots * group, steps)

    empty = (anchor_GS < 0).repeat_interleave(group, dim=1)[:, None, :, None]
    weight = torch.softmax(torch.cat((prefix_GkRT.masked_fill(empty, 0.0), own_GkRS), dim=-1), dim=-1).to(query_CHd.dtype)
    prefix_weight, own_weight = weight[..., : prefix_key_GTkd.shape[1]], weight[..., prefix_key_GTkd.shape[1] :]
    seen_GkRd = prefix_weight @ prefix_value_GTkd.permute(0, 2, 1, 3)
    seen_Ckgd = seen_GkRd.reshape(documents, kv, slots, group, dim)[document_C, :, slot_C]
    own_weight_CkgS = own_weight.reshape(documents, kv, slots, group, steps)[document_C, :, slot_C]
    own_Ckgd = torch.einsum("ckgs,cskd->ckgd", own_weight_CkgS, own_value_CSkd)
    return (seen_Ckgd + own_Ckgd).reshape(chains, heads, dim)


def attend(
    query_BQhd: Float[Tensor, "B Q heads d"],
    key_BTkd: Float[Tensor, "B T kv d"],
    value_BTkd: Float[Tensor, "B T kv d"],
    mask_BQT: Bool[Tensor, "B Q T"],
) -> Float[Tensor, "B Q heads d"]:
    """Plain masked attention, for drafting."""
    query, key, value = (x.transpose(1, 2) for x in (query_BQhd, key_BTkd, value_BTkd))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_BQT[:, None], enable_gqa=True)
    return out.transpose(1, 2)


@dataclass
class KeyValues:
    """Keys and values of drafting, with the places that hold real tokens.

    Rows of a batch accept different numbers of tokens: what a row rejected stays as an invalid place until no row needs it.
    """

    key_BTkd: Tensor
    value_BTkd: Tensor
    valid_BT: Tensor

    def append(self, key_BQkd: Tensor, value_BQkd: Tensor, valid_BQ: Tensor) -> None:
        """Add Q places."""
        self.key_BTkd = torch.cat((self.key_BTkd, key_BQkd), dim=1)
        self.value_BTkd = torch.cat((self.value_BTkd, value_BQkd), dim=1)
        self.valid_BT = torch.cat((self.valid_BT, valid_BQ), dim=1)

    def crop(self, length: int) -> None:
        """Keep the first places."""
        self.key_BTkd, self.value_BTkd, self.valid_BT = (x[:, :length] for x in (self.key_BTkd, self.value_BTkd, self.valid_BT))

    def trim(self) -> None:
        """Drop places at the end that no row holds."""
        used = self.valid_BT.any(dim=0).nonzero()
        self.crop(int(used[-1]) + 1 if len(used) else 0)

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.key_BTkd, self.value_BTkd, self.valid_BT = (x[rows] for x in (self.key_BTkd, self.value_BTkd, self.valid_BT))

    def __len__(self) -> int:
        return self.valid_BT.shape[1]
