"""What must hold for one class of the zoo, saved in one layout and loaded with no flag."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo_fixes import INNER, LISTS

from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 28, 41, 11, 60, 7], [8, 8, 30, 4, 70, 66, 12, 13, 6]])
_IMPOSSIBLE = -1e30


def examine(case: zoo.Case, tied: bool, layout: str, folder: Path) -> Target:
    """Build, save, load, compare. Raises AssertionError for what differs, ValueError for what is refused."""
    model = zoo.build(case, tied)
    zoo.save(model, folder, layout)
    target = Target.load(str(folder))
    loaded = TargetModel.load(str(folder), torch.float32)
    own = speaks(model)
    with torch.no_grad():
        outputs, by_hand = hooked(own, IDS)
    states = loaded.run(IDS, range(zoo.BLOCKS))
    assert states.hidden_BQF is not None
    check_logits(target.logits(states.last_BQH), outputs.logits)
    assert torch.equal(target.embed(IDS), own.get_input_embeddings().weight[IDS]), "embed(ids) are not the embedding's rows"
    assert target.tied == zoo.ties(own), f"tied is {target.tied}"
    check_blocks(states.hidden_BQF.chunk(zoo.BLOCKS, -1), by_hand, outputs.hidden_states)
    check_norm(target, model, by_hand[-1], states.last_BQH)
    return target


def speaks(model: PreTrainedModel) -> PreTrainedModel:
    """The model; its text model where the wrapper's own forward demands an image."""
    inner = INNER.get(type(model).__name__)
    return model if inner is None else model.get_submodule(inner)


def blocks_by_hand(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of blocks, by the names that families use."""
    decoder: Any = model.get_decoder()
    for name in LISTS:
        place: Any = decoder
        for step in name.split("."):
            place = getattr(place, step, None)
        if isinstance(place, nn.ModuleList) and len(place) == zoo.BLOCKS:
            return place
    raise AssertionError(
        f"no list of {zoo.BLOCKS} blocks in {type(decoder).__name__}: {[n for n, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]}"
    )


def hooked(model: PreTrainedModel, ids: Tensor) -> tuple[Any, list[Tensor]]:
    """The model's outputs, and every block's, block 0 first."""
    seen: list[Tensor] = []

    def keep(_m: nn.Module, _i: object, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple | list) else output)

    with ExitStack() as stack:
        for block in blocks_by_hand(model):
            stack.callback(block.register_forward_hook(keep).remove)
        outputs = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert len(seen) == zoo.BLOCKS, f"blocks ran {len(seen)} times"
    return outputs, seen


def check_logits(ours: Tensor, own: Tensor) -> None:
    """Within 1e-5 of the largest logit; ids that the model never produces are ours too."""
    possible = own > _IMPOSSIBLE
    assert ours.shape == own.shape, f"logits {tuple(ours.shape)}, the model's {tuple(own.shape)}"
    assert torch.equal(possible, ours > _IMPOSSIBLE), "other ids are impossible"
    error = float((ours - own)[possible].abs().max() / own[possible].abs().max())
    assert error <= 1e-5, f"logits differ by {error:.1e} of the largest"


def check_blocks(tapped: Sequence[Tensor], by_hand: Sequence[Tensor], hidden_states: Sequence[Tensor] | None) -> None:
    """What is tapped is what hooks see and, where the class counts the embedding and each block once, what the class itself hands out."""
    for i, (ours, hand) in enumerate(zip(tapped, by_hand, strict=True)):
        assert ours.shape == hand.shape, f"block {i} is {tuple(ours.shape)}, by hand {tuple(hand.shape)}"
        torch.testing.assert_close(ours, hand, rtol=1e-5, atol=1e-5, msg=f"block {i} is not what a hook sees")
    if hidden_states is not None and len(hidden_states) == zoo.BLOCKS + 1 and hidden_states[1].shape == by_hand[0].shape:
        for i in range(zoo.BLOCKS - 1):
            torch.testing.assert_close(tapped[i], hidden_states[i + 1], rtol=1e-5, atol=1e-5, msg=f"block {i} is not hidden_states[{i + 1}]")


def check_norm(target: Target, model: PreTrainedModel, final: Tensor, last: Tensor) -> None:
    """Where the norm is known, it turns the last block's output into what the head multiplies."""
    rule, pre = target.finder.parts.norm, target.rule.pre
    if rule is None or pre is None:
        return
    centred = final - final.mean(-1, keepdim=True) if rule.kind == "layer" else final
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + rule.eps) * target.norm_H
    if rule.bias is not None:
        normed = normed + model.state_dict()[rule.bias]
    torch.testing.assert_close(normed * pre, last, rtol=1e-4, atol=1e-4, msg="the norm of the last block's output is not what the head multiplies")
