"""Sixteen hex digits that tell targets apart: features of one must not pass for features of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedConfig

from draftsmith.target.place import HubPlace, Place
from draftsmith.target.tensors import groups

_SKIPPED = ("_name_or_path", "transformers_version", "dtype")


def fingerprint(config: PreTrainedConfig, places: Sequence[Place], checksum: int) -> str:
    """Of the configuration, every bit of the embedding, norm and head (`checksum`), and a sample of every tensor that transformers would load.

    One file, shards and `.bin` of the same tensors have the same. Of a hub repository, most of which is not here, its commit stands for the tensors.
    """
    settings = {k: v for k, v in config.to_dict().items() if k not in _SKIPPED}
    digest = hashlib.sha256(f"{json.dumps(settings, sort_keys=True, default=str)} {checksum}".encode())
    for place in places:
        if isinstance(place, HubPlace):
            digest.update(place.snapshot.commit.encode())
            continue
        first = groups(place)[0]
        for key in sorted(first.file_of):
            digest.update(key.encode() + first.sample(key))
        first.close()
    return digest.hexdigest()[:16]
