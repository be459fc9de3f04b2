"""Masked attention and the key-value cache of drafting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
