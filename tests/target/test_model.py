"""The target's states against hooks and loops written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import saved
from families import PLAIN
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 88, 41, 2, 60], [7, 7, 30, 4, 1, 90, 12, 13]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TargetModel]:
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(name: str) -> TargetModel:
        if name not in made:
            made[name] = TargetModel.load(str(saved(PLAIN[name](), root / name)), torch.float32)
        return made[name]

    return make


def hooked(target: TargetModel, ids: Tensor) -> list[Tensor]:
    """Every block's output, block 0 first, from hooks on transformers' own list of layers."""
    outputs: list[Tensor] = []

    def keep(_m: nn.Module, _i: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [layer.register_forward_hook(keep) for layer in target.model.model.layers]
    with torch.no_grad():
        target.model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 3), (3,)])
@pytest.mark.parametrize("family", PLAIN)
def test_tapped_blocks_are_those_of_hooks_by_hand(model: Callable[[str], TargetModel], family: str, layers: tuple[int, ...]) -> None:
    target = model(family)
    by_hand = hooked(target, IDS)
    hidden = target.run(IDS, layers).hidden_BQF
    assert hidden is not None
    assert torch.equal(hidden, torch.cat([by_hand[i] for i in layers], dim=-1))
    assert all(not torch.equal(by_hand[i], by_hand[i + 1]) for i in range(3))


@pytest.mark.parametrize("family", PLAIN)
def test_last_is_what_the_head_multiplies(model: Callable[[str], TargetModel], family: str) -> None:
    target = model(family)
    seen: list[Tensor] = []
    handle = target.model.get_output_embeddings().register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        target.model(input_ids=IDS)
    handle.remove()
    assert torch.equal(target.run(IDS).last_BQH, seen[0])


def test_without_layers_nothing_is_tapped_and_no_hook_stays(model: Callable[[str], TargetModel]) -> None:
    target = model("llama")
    assert target.run(IDS).hidden_BQF is None
    before = [len(block._forward_hooks) for block in target.blocks]
    target.run(IDS, (0, 2))
    assert [len(block._forward_hooks) for block in target.blocks] == before
    assert target.run(IDS).hidden_BQF is None


@pytest.mark.parametrize(("family", "ids", "layers"), [("mistral", [[5, 10_000]], (0, 2)), ("qwen3", [[5, 9]], (0, 99))])
def test_hooks_are_removed_when_the_pass_fails(model: Callable[[str], TargetModel], family: str, ids: list[list[int]], layers: tuple[int, ...]) -> None:
    target = model(family)
    before = [len(block._forward_hooks) for block in target.blocks]
    with pytest.raises(IndexError):
        target.run(torch.tensor(ids), layers)
    assert [len(block._forward_hooks) for block in target.blocks] == before


def test_it_is_frozen_and_in_evaluation_mode(model: Callable[[str], TargetModel]) -> None:
    target = model("llama")
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.run(IDS).last_BQH.requires_grad


def test_positions_are_the_callers(model: Callable[[str], TargetModel]) -> None:
    """Rotary attention sees differences alone: shifting every position changes nothing, stretching them does."""
    target = model("llama")
    place = torch.arange(IDS.shape[1]).expand(2, -1)
    plain = target.run(IDS).last_BQH
    torch.testing.assert_close(target.run(IDS, position_BQ=place).last_BQH, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.run(IDS, position_BQ=place + 40).last_BQH, plain, rtol=1e-4, atol=1e-4)
    assert (target.run(IDS, position_BQ=place * 3).last_BQH - plain).abs().max() > 1e-2


@pytest.mark.parametrize("family", PLAIN)
def test_a_mask_hides_exactly_what_it_says(model: Callable[[str], TargetModel], family: str) -> None:
    """A row with hidden padding in the middle equals the row without it."""
    target = model(family)
    short = IDS[:1, [0, 1, 2, 6, 7]]
    hole = IDS[:1]
    order = torch.arange(8)
    real = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    mask = ((order <= order[:, None]) & real)[None, None] | torch.eye(8, dtype=torch.bool)
    position = torch.tensor([[0, 1, 2, 0, 0, 0, 3, 4]])
    masked = target.run(hole, (1,), position, mask)
    alone = target.run(short, (1,))
    torch.testing.assert_close(masked.last_BQH[:, real], alone.last_BQH, rtol=1e-4, atol=1e-5)
    assert masked.hidden_BQF is not None
    assert alone.hidden_BQF is not None
    torch.testing.assert_close(masked.hidden_BQF[:, real], alone.hidden_BQF, rtol=1e-4, atol=1e-5)


def test_the_dtype_is_the_one_asked_for(tiny_target: Path) -> None:
    target = TargetModel.load(str(tiny_target), torch.bfloat16)
    assert target.run(IDS).last_BQH.dtype == torch.bfloat16


def test_what_is_no_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"t5: t5 is an encoder-decoder"):
        TargetModel.load(str(tmp_path / "t5"), torch.float32)


def test_a_model_without_a_list_of_blocks_is_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    model.model.layers = None
    with pytest.raises(ValueError, match="no list of 6 decoder blocks"):
        TargetModel(model)


def without(folder: Path, key: str) -> Path:
    """The checkpoint, a tensor taken out."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[key]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_checkpoint_with_a_hole_is_refused_and_not_filled_with_noise(tmp_path: Path, key: str) -> None:
    folder = without(saved(PLAIN["llama"](), tmp_path / "llama"), key)
    with pytest.raises(ValueError, match=rf"llama: 1 parameters of LlamaForCausalLM are not in the files \({key}\)"):
        TargetModel.load(str(folder), torch.float32)


def test_without_a_head_on_disk_the_model_speaks_with_its_embedding_as_the_target_does(tmp_path: Path) -> None:
    """transformers would make up a random head under a flag that says untied."""
    folder = str(without(saved(PLAIN["llama"](), tmp_path / "llama"), "lm_head.weight"))
    with pytest.warns(UserWarning, match="the embedding is used as the head"):
        model, target = TargetModel.load(folder, torch.float32), Target.load(folder)
    assert torch.equal(model.head.weight, target.embedding_VH)
    torch.testing.assert_close(model.own_logits(IDS), target.logits(model.run(IDS).last_BQH), rtol=1e-5, atol=1e-5)


def test_several_streams_are_averaged_and_a_shape_that_is_none_is_refused(model: Callable[[str], TargetModel]) -> None:
    target = model("llama")
    plain = target.run(IDS, (2,)).hidden_BQF
    assert plain is not None
    for streams, found in ((lambda x: torch.stack((x, 3 * x), 2), 2 * plain), (lambda x: torch.stack((x, 3 * x, 5 * x), 0), 3 * plain)):
        torch.testing.assert_close(target._one_state(2, [streams(plain)], IDS.shape), found)
    for wrong in (plain[:, 1:], plain[0], plain.movedim(1, 0)):
        with pytest.raises(ValueError, match="block 2 of LlamaForCausalLM cannot be tapped: it gives"):
            target._one_state(2, [wrong], IDS.shape)
    with pytest.raises(ValueError, match="block 2 of LlamaForCausalLM cannot be tapped: it runs 2 times a pass"):
        target._one_state(2, [plain, plain], IDS.shape)
