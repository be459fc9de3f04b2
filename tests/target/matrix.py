"""What must hold for one class of the zoo, saved in one layout and loaded with no flag."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo_fixes import BOTH_WAYS, INNER, LISTS, MIXED, SKIPPED, UNTAPPED

from draftsmith.target.families import Anatomy
from draftsmith.target.model import TargetModel
from draftsmith.target.rules import NormRule
from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 28, 41, 11, 60, 7], [8, 8, 30, 4, 70, 66, 12, 13, 6]])
_IMPOSSIBLE = -1e30


@dataclass
class Seen:
    """What hooks by hand saw in one pass of the model that was saved."""

    outputs: Any = None
    first: list[Tensor] = field(default_factory=list)
    """What went into block 0."""
    blocks: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(zoo.BLOCKS)])
    normed: list[Tensor] = field(default_factory=list)
    """What went into the final norm."""

    def state(self, i: int) -> Tensor:
        """The one output of block i; the mean of its streams where it has several."""
        output = self.blocks[i][0]
        return output if output.ndim == 3 else output.mean(2 if output.shape[:2] == IDS.shape else 0)


def examine(case: zoo.Case, parts: Anatomy, tied: bool, layouts: Sequence[str], folder: Path) -> bool:
    """Build, save in each layout, load, compare. Raises AssertionError for what differs, ValueError for what is refused.

    `parts`: of the norm that is said to be known, checked here too. False, with nothing done, where the class does not take this tie flag.
    """
    try:
        model = zoo.build(case, tied)
    except StrictDataclassClassValidationError as error:
        if "tie_word_embeddings" not in str(error):
            raise
        return False
    if zoo.ties(model) != tied:
        return False
    own = speaks(model)
    seen = hooked(own, None if parts.norm_module is None else model.get_submodule(parts.norm_module))
    for layout in layouts:
        place = folder / layout.replace(", ", "-").replace(" ", "-")
        zoo.save(model, place, layout)
        target, loaded = Target.load(str(place)), TargetModel.load(str(place), torch.float32)
        last = loaded.run(IDS).last_BQH
        check_logits(target.logits(last), seen.outputs.logits)
        check_logits(loaded.own_logits(IDS), seen.outputs.logits)
        assert torch.equal(target.embed(IDS), own.get_input_embeddings().weight[IDS]), "embed(ids) are not the embedding's rows"
        assert target.tied == tied, f"tied is {target.tied}"
        check_blocks(case, loaded, seen, last)
        check_norm(case, parts.norm, target, model, seen, last)
        check_causal(case, loaded)
    check_decoding(loaded)
    return True


def speaks(model: PreTrainedModel) -> PreTrainedModel:
    """The model; its text model where the wrapper's own forward demands an image."""
    inner = INNER.get(type(model).__name__)
    return model if inner is None else model.get_submodule(inner)


def blocks_by_hand(model: PreTrainedModel) -> nn.ModuleList:
    """The list of blocks, by the names that families use; vision and sound towers have fewer."""
    for body in (model.get_decoder(), model.base_model, model):
        for name in LISTS:
            place: Any = body
            for step in name.split("."):
                place = getattr(place, step, None)
            if isinstance(place, nn.ModuleList) and len(place) == zoo.BLOCKS:
                return place
    raise AssertionError(f"no list of {zoo.BLOCKS} blocks in {type(model).__name__}: {[n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]}")


def hooked(model: PreTrainedModel, norm: nn.Module | None) -> Seen:
    """One pass of the model over the ids."""
    seen = Seen()
    blocks = blocks_by_hand(model)

    def keep(place: list[Tensor]) -> Any:
        return lambda _module, _inputs, output: place.append(output[0] if isinstance(output, tuple | list) else output)

    with ExitStack() as stack, torch.no_grad():
        for place, block in zip(seen.blocks, blocks, strict=True):
            stack.callback(block.register_forward_hook(keep(place)).remove)
        into = lambda given, named: given[0] if given else named["hidden_states"]  # noqa: E731
        stack.callback(blocks[0].register_forward_pre_hook(lambda _m, given, named: seen.first.append(into(given, named)), with_kwargs=True).remove)
        if norm is not None:
            stack.callback(norm.register_forward_pre_hook(lambda _m, given: seen.normed.append(given[0])).remove)
        seen.outputs = model(input_ids=IDS, use_cache=False, output_hidden_states=True)
    return seen


def check_logits(ours: Tensor, own: Tensor) -> None:
    """Within 1e-5 of the largest logit; ids that the model never produces are ours too."""
    possible = own > _IMPOSSIBLE
    assert ours.shape == own.shape, f"logits {tuple(ours.shape)}, the model's {tuple(own.shape)}"
    assert torch.equal(possible, ours > _IMPOSSIBLE), "other ids are impossible"
    error = float((ours - own)[possible].abs().max() / own[possible].abs().max())
    assert error <= 1e-5, f"logits differ by {error:.1e} of the largest"


def check_blocks(case: zoo.Case, loaded: TargetModel, seen: Seen, last: Tensor) -> None:
    """What is tapped is what hooks see, and what the class itself hands out; blocks that do not run once a pass are refused by name."""
    name = case.architecture
    times = dict.fromkeys(range(zoo.BLOCKS), 1) | dict.fromkeys(SKIPPED.get(name, ()), 0)
    assert {i: len(outputs) for i, outputs in enumerate(seen.blocks)} == times
    once = [] if name in UNTAPPED else [i for i in times if times[i] == 1]
    states = loaded.run(IDS, once)
    torch.testing.assert_close(states.last_BQH, last, rtol=1e-5, atol=1e-5, msg="taps change the state")
    tapped_each = () if states.hidden_BQF is None else states.hidden_BQF.chunk(len(once), -1)
    for i, tapped in zip(once, tapped_each, strict=True):
        torch.testing.assert_close(tapped, seen.state(i), rtol=1e-5, atol=1e-5, msg=f"block {i} is not what a hook sees")
        handed = _handed_out(seen, i)
        if handed is not None:
            torch.testing.assert_close(tapped, handed, rtol=1e-5, atol=1e-5, msg=f"block {i} is not what output_hidden_states gives")
    for i in set(times) - set(once):
        with pytest.raises(ValueError, match=rf"block {i} of \w+ cannot be tapped"):
            loaded.run(IDS, (i,))


def _handed_out(seen: Seen, i: int) -> Tensor | None:
    """Block i in `output_hidden_states`, where the class has one entry per block: most count what enters block 0 as well, and norm the last."""
    every: Sequence[Tensor] = getattr(seen.outputs, "hidden_states", None) or ()
    if not every or every[0].shape != IDS.shape + seen.first[0].shape[-1:]:
        return None
    counted = torch.equal(every[0], seen.first[0])
    return every[i + counted] if len(every) == zoo.BLOCKS + 1 and i < zoo.BLOCKS - 1 else None


def check_norm(case: zoo.Case, rule: NormRule | None, target: Target, model: PreTrainedModel, seen: Seen, last: Tensor) -> None:
    """Where the norm is known, it turns the last block's output into what the head multiplies."""
    pre = target.rule.pre
    if rule is None or pre is None or case.architecture in UNTAPPED:
        return
    final = seen.normed[-1]
    if case.architecture not in MIXED:
        torch.testing.assert_close(final, seen.state(zoo.BLOCKS - 1), rtol=1e-5, atol=1e-5, msg="the final norm takes something else than the last block")
    centred = final - final.mean(-1, keepdim=True) if rule.kind == "layer" else final
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + rule.eps) * target.norm_H
    if rule.bias is not None:
        normed = normed + model.state_dict()[rule.bias]
    torch.testing.assert_close(normed * pre, last, rtol=1e-4, atol=1e-4, msg="the norm is not what the head multiplies")


def check_causal(case: zoo.Case, loaded: TargetModel) -> None:
    """No state changes with what follows, or capture refuses."""
    if case.architecture in BOTH_WAYS:
        with pytest.raises(ValueError, match="no causal language model on text"):
            loaded.require_causal(IDS)
        return
    loaded.require_causal(IDS)
    whole, part = loaded.run(IDS).last_BQH, loaded.run(IDS[:, :6]).last_BQH
    torch.testing.assert_close(part, whole[:, :6], rtol=1e-4, atol=1e-4, msg="states change with later tokens")


def check_decoding(loaded: TargetModel) -> None:
    """Token by token with a cache, after rejected tokens, alone and beside a shorter row, the states are those of one pass; or it is refused by name."""
    whole = loaded.run(IDS[:1]).last_BQH
    try:
        cache = loaded.new_cache()
    except ValueError as error:
        if type(loaded.speaker).__name__ not in str(error):
            raise
        return
    order = torch.arange(9)[None]
    steps = [loaded.run(IDS[:1, :4], (), order[:, :4], None, cache)]
    loaded.run(IDS[1:, :3], (), order[:, 4:7], None, cache)
    cache.crop(-3)
    steps += [loaded.run(IDS[:1, i : i + 1], (), order[:, i : i + 1], None, cache) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat([s.last_BQH for s in steps], 1), whole, rtol=1e-4, atol=1e-4, msg="decoding is not one pass")
    if loaded.takes_masks and (loaded.window or 9) >= 9:
        check_rows(loaded, whole)


def check_rows(loaded: TargetModel, whole: Tensor) -> None:
    """A row of nine beside a row of six, which leaves three places hidden behind its first four tokens."""
    cache, order = loaded.new_cache(), torch.arange(9)
    ids = torch.stack([IDS[0], torch.cat([IDS[1, :4], IDS[0, :3], IDS[1, 4:6]])])
    real = torch.tensor([[True] * 9, [True] * 4 + [False] * 3 + [True] * 2])
    position = torch.where(real, real.cumsum(1) - 1, 0)
    mask = ((order <= order[:, None]) & real[:, None] | torch.eye(9, dtype=torch.bool))[:, None]
    first = loaded.run(ids[:, :7], (), position[:, :7], mask[:, :, :7, :7], cache).last_BQH
    second = loaded.run(ids[:, 7:], (), position[:, 7:], mask[:, :, 7:], cache).last_BQH
    rows = torch.cat([first, second], 1)
    torch.testing.assert_close(rows[:1], whole, rtol=1e-4, atol=1e-4, msg="the longer row differs from the row alone")
    alone = loaded.run(IDS[1:, :6]).last_BQH
    torch.testing.assert_close(rows[1:, real[1]], alone, rtol=1e-4, atol=1e-4, msg="the shorter row differs from the row alone")
