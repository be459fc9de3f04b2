"""The growing cache against transformers' own, through growth, cropping and dropped rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import saved
from families import SIZES
from torch import Tensor
from transformers import DynamicCache, MistralConfig
from transformers.cache_utils import Cache

from draftsmith.target import cache as module
from draftsmith.target.cache import growing_cache
from draftsmith.target.model import TargetModel

B = 3


def tokens(n: int, seed: int = 0, rows: int = B) -> Tensor:
    return torch.randint(3, 259, (rows, n), generator=torch.Generator().manual_seed(seed))


def caches() -> tuple[Cache, Cache]:
    return growing_cache(6), DynamicCache()


def both(target_model: TargetModel, ids: Tensor, pair: tuple[Cache, Cache]) -> None:
    """The same pass with either cache: the same states, keys and values."""
    ours, theirs = (target_model.run(ids, (1, 5), cache=c) for c in pair)
    torch.testing.assert_close(ours.last_BQH, theirs.last_BQH, rtol=1e-5, atol=1e-5)
    assert ours.hidden_BQF is not None
    assert theirs.hidden_BQF is not None
    torch.testing.assert_close(ours.hidden_BQF, theirs.hidden_BQF, rtol=1e-5, atol=1e-5)
    compare(pair)


def compare(pair: tuple[Cache, Cache]) -> None:
    for mine, other in zip(pair[0].layers, pair[1].layers, strict=True):
        assert mine.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 30, module._ROOM - 1, module._ROOM, module._ROOM + 1, 2 * module._ROOM + 5])
def test_token_by_token_beyond_the_room_equals_the_dynamic_cache(target_model: TargetModel, prompt: int) -> None:
    pair = caches()
    both(target_model, tokens(prompt), pair)
    for step in range(module._ROOM // 2 + 3):
        both(target_model, tokens(1 if step % 5 else 4, step + 1), pair)
    assert pair[0].get_seq_length() > prompt + module._ROOM // 2


def test_many_steps_equal_one_pass_without_a_cache(target_model: TargetModel) -> None:
    ids = tokens(3 * module._ROOM)
    cache = growing_cache(6)
    stepped = torch.cat([target_model.run(ids[:, i : i + 6], cache=cache).last_BQH for i in range(0, ids.shape[1], 6)], dim=1)
    torch.testing.assert_close(stepped, target_model.run(ids).last_BQH, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("crop", [-1, -5, -34, -80, -90])
def test_what_was_cropped_is_forgotten(target_model: TargetModel, crop: int) -> None:
    pair = caches()
    both(target_model, tokens(100), pair)
    for cache in pair:
        cache.crop(crop)
    compare(pair)
    kept = 100 + crop
    assert pair[0].get_seq_length() == kept
    for step in range(3):
        both(target_model, tokens(40, step + 1), pair)
    fresh = target_model.run(torch.cat([tokens(100)[:, :kept], *(tokens(40, s + 1) for s in range(3))], dim=1)).last_BQH[:, -1]
    again = growing_cache(6)
    target_model.run(tokens(100), cache=again)
    again.crop(crop)
    steps = [target_model.run(tokens(40, s + 1), cache=again).last_BQH for s in range(3)]
    torch.testing.assert_close(steps[-1][:, -1], fresh, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [[0], [2], [0, 2], [2, 0], [1, 1, 0]])
def test_selected_rows_go_on_alone(target_model: TargetModel, rows: list[int]) -> None:
    pair, kept = caches(), torch.tensor(rows)
    both(target_model, tokens(70), pair)
    both(target_model, tokens(1, 1), pair)
    for cache in pair:
        cache.batch_select_indices(kept)
    compare(pair)
    for step in range(2, 5):
        both(target_model, tokens(50, step)[kept], pair)
    whole = torch.cat([tokens(70), tokens(1, 1), *(tokens(50, s) for s in range(2, 5))], dim=1)[kept]
    ours = target_model.run(tokens(1, 9)[kept], cache=pair[0]).last_BQH
    torch.testing.assert_close(ours, target_model.run(torch.cat([whole, tokens(1, 9)[kept]], dim=1)).last_BQH[:, -1:], rtol=1e-4, atol=1e-4)


def test_selection_crop_and_growth_in_turn(target_model: TargetModel) -> None:
    pair = caches()
    generator = torch.Generator().manual_seed(4)
    rows, length = B, 0
    for step in range(40):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        both(target_model, tokens(n, step, rows), pair)
        length += n
        drop = int(torch.randint(0, n, (1,), generator=generator))
        if drop:
            length -= drop
            for cache in pair:
                cache.crop(-drop)
        if step in (15, 30):
            rows -= 1
            for cache in pair:
                cache.batch_select_indices(torch.arange(1, rows + 1))
        compare(pair)
    assert pair[0].get_seq_length() == length > 2 * module._ROOM
    assert rows == 1


def test_room_is_reused_and_keys_are_views_of_it(target_model: TargetModel) -> None:
    cache = growing_cache(6)
    target_model.run(tokens(10), cache=cache)
    before = cache.layers[0].keys.data_ptr()
    for step in range(module._ROOM):
        target_model.run(tokens(1, step), cache=cache)
        assert cache.layers[0].keys.data_ptr() == before
    target_model.run(tokens(1), cache=cache)
    assert cache.layers[0].keys.data_ptr() != before


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    config = MistralConfig(**SIZES, sliding_window=8, tie_word_embeddings=False)
    folder: Path = saved(config, tmp_path_factory.mktemp("windowed") / "mistral")
    return TargetModel.load(str(folder), torch.float32)


def test_a_target_with_a_sliding_window_sees_the_same_with_the_cache(windowed: TargetModel) -> None:
    ids = tokens(40) % 97
    whole = windowed.run(ids).last_BQH
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 97
    torch.testing.assert_close(windowed.run(changed).last_BQH[:, 33:], whole[:, 33:])  # 4 blocks reach 4 * 7 tokens back
    cache = windowed.new_cache()
    stepped = torch.cat([windowed.run(ids[:, i : i + 5], cache=cache).last_BQH for i in range(0, 40, 5)], dim=1)
    torch.testing.assert_close(stepped, whole, rtol=1e-4, atol=1e-4)


def test_a_callers_mask_does_not_open_the_sliding_window(windowed: TargetModel) -> None:
    """Decoding a batch of unequal prompts masks by hand; the target's own window holds there too."""
    ids, order = tokens(40) % 97, torch.arange(40)
    causal = (order <= order[:, None]).expand(B, 1, -1, -1)
    masked = windowed.run(ids, (), order.expand(B, -1), causal).last_BQH
    torch.testing.assert_close(masked, windowed.run(ids).last_BQH, rtol=1e-4, atol=1e-4)
