"""`draftsmith inspect`: what it finds against what was built, its page for people, and what it says of targets that cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, Mamba2Config, PhiConfig, PreTrainedConfig

from draftsmith import inspect as inspection
from draftsmith.core.log import console
from draftsmith.drafts import DRAFTS
from draftsmith.target.config import TargetConfig

SIZES = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A checkpoint of a configuration, with tokenizer."""

    def make(config: PreTrainedConfig, name: str = "target") -> Path:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def looked_at(folder: Path, **settings: Any) -> dict[str, Any]:
    found = inspection.inspect(TargetConfig(where=str(folder), **settings))
    assert json.loads(json.dumps(found)) == found
    return found


def page(found: dict[str, Any], capsys: pytest.CaptureFixture[str], width: int = 80) -> str:
    console.width = width
    try:
        inspection.show(found)
    finally:
        console._width = None
    return capsys.readouterr().out


def concern(found: dict[str, Any], *words: str) -> bool:
    return any(all(word in text for word in words) for text in found["concerns"])


def test_a_sound_target(tiny_target: Path) -> None:
    found = looked_at(tiny_target)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target)
    assert (found["architecture"], found["tied"], found["tie_flag"], found["logit_rule"]) == ("LlamaForCausalLM", True, True, "head @ last")
    assert found["embedding"] == {
        "key": "model.embed_tokens.weight", "file": "model.safetensors", "shape": [259, 32], "dtype": "F32", "parameter": "model.embed_tokens.weight",
    }  # fmt: skip
    assert found["head"] == found["embedding"] | {"why": "no head tensor on disk: the embedding is the head"}
    assert found["norm"]["key"] == "model.norm.weight"
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (found["vocab_size"], found["hidden_size"], found["layers"], found["context"], found["rope"]["rope_theta"]) == (259, 32, 6, 512, 5000.0)
    assert (259 * 32 + 32) * 4 < found["bytes_read"] < (259 * 32 + 32) * 4 + 8000
    assert found["bytes"] == (tiny_target / "model.safetensors").stat().st_size
    assert found["tokenizer"] == {
        "ids": 259, "padding_rows": 0, "bos": None, "eos": "<|im_end|>", "pad": "<|endoftext|>", "ends_a_turn": ["<|im_end|>"],
        "chat_template": {"system": True, "tools": False, "generation_prompt": True, "thinking": False, "generation_marks": False},
    }  # fmt: skip
    assert found["problem"] is None


@pytest.mark.parametrize(("blocks", "layers"), [(6, None), (8, [1, 3, 4]), (12, [1, 5, 8])])
def test_default_layers_and_what_a_token_costs(made: Make, blocks: int, layers: list[int] | None) -> None:
    found = looked_at(made(tiny_config(num_hidden_layers=blocks, vocab_size=9000)))
    if layers is None:
        assert found["captures"] == {}
        assert concern(found, "only 6 blocks", "draft.layers")
        return
    for kind, draft in DRAFTS.items():
        built: Any = draft(draft.config_class(), inspection.load_target(TargetConfig(where=found["target"]), "cpu", None).shape)  # type: ignore[call-arg]
        assert found["captures"][kind] == {
            "layers": layers, "dtype": "bfloat16", "bytes_per_token": 4 * 32 * 2 + 9, "gb_per_million_tokens": 0.265,
            "draft_parameters": sum(p.numel() for p in built.parameters()),
        }  # fmt: skip


def test_padding_rows_are_counted(made: Make) -> None:
    found = looked_at(made(tiny_config(vocab_size=300)))
    assert (found["vocab_size"], found["tokenizer"]["ids"], found["tokenizer"]["padding_rows"]) == (300, 259, 41)
    assert concern(found, "41 rows", "padding")


def test_more_ids_than_rows(made: Make) -> None:
    assert concern(looked_at(made(tiny_config(vocab_size=200))), "no stage but this one can run", "ids up to 258", "only 200 rows")


def test_what_families_do_is_told(made: Make) -> None:
    found = looked_at(made(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0, sliding_window=16), "gemma2"))
    assert found["logit_rule"] == "3 x tanh(head @ last / 3)"
    assert (found["window"], found["norm_rule"]) == (16, "RMS norm, 1 + weight, eps 1e-06")
    assert found["embedding_scale"] == pytest.approx(32**0.5)
    assert concern(found, "the same greedy tokens", "another distribution")
    assert concern(found, "sliding-window", "16 tokens back")
    assert concern(found, "multiplies embeddings by 5.6568")
    found = looked_at(made(PhiConfig(**SIZES), "phi"))
    assert found["logit_rule"] == "head @ last + bias"
    assert found["head_bias"]["key"] == "lm_head.bias"
    assert concern(found, "chooses other tokens")
    assert found["embedding_scale"] == 1
    config = Mamba2Config(vocab_size=259, hidden_size=32, num_hidden_layers=8, num_heads=8, head_dim=8, state_size=16, n_groups=1)
    found = looked_at(made(config, "mamba2"))
    assert found["rope"] is None
    assert concern(found, "recurrent blocks", "cannot decode")
    assert found["recurrent"] is True


def test_differing_head_under_a_tied_flag(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "both"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 1.5}, folder / "model.safetensors", metadata={"format": "pt"})
    found = looked_at(folder)
    assert (found["tied"], found["tie_flag"], found["head"]["key"]) == (False, True, "lm_head.weight")
    assert concern(found, "lm_head.weight differs", "SGLang and vLLM drop it")


def test_without_tokenizer_or_template(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    found = looked_at(folder)
    assert found["tokenizer"] is None
    assert concern(found, "no stage but this one can run", "no chat template")


@pytest.mark.parametrize(
    ("template", "able"),
    [
        ("{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}", {"tools", "system"}),
        (
            "{% for m in messages if m.role != 'system' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% if enable_thinking %}<think>{% endif %}{% endif %}",
            {"generation_prompt", "thinking", "generation_marks"},
        ),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", set()),
    ],
)
def test_what_a_template_can_do_is_seen_from_what_it_renders(tiny_target: Path, tmp_path: Path, template: str, able: set[str]) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "spoken"))
    (folder / "chat_template.jinja").write_text(template)
    found = looked_at(folder)
    assert {name for name, on in found["tokenizer"]["chat_template"].items() if on} == able
    assert concern(found, "opens no assistant turn") == ("generation_prompt" not in able)


@pytest.fixture
def packed(made: Make) -> Path:
    """An untied checkpoint whose head is packed as GPTQ packs it."""
    folder = made(tiny_config(num_hidden_layers=8, vocab_size=9000, tie_word_embeddings=False), "packed")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors |= {"lm_head.qweight": torch.zeros(4, 9000, dtype=torch.int32), "lm_head.g_idx": torch.zeros(32, dtype=torch.int32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_packed_head_is_the_problem_beside_all_that_was_found(packed: Path, made: Make) -> None:
    found = looked_at(packed)
    assert "lm_head.qweight is packed (GPTQ" in found["problem"]
    assert "target.head_from" in found["problem"]
    assert found["embedding"]["key"] == "model.embed_tokens.weight"
    assert found["head"]["key"] == "lm_head.qweight"
    assert (found["architecture"], found["vocab_size"], found["tied"], found["bytes_read"]) == ("LlamaForCausalLM", 9000, None, None)
    assert found["captures"].keys() == DRAFTS.keys()
    plain = made(tiny_config(num_hidden_layers=8, vocab_size=9000, tie_word_embeddings=False), "plain")
    helped = looked_at(packed, head_from=str(plain))
    assert (helped["problem"], helped["head"]["key"], helped["head_from"]) == (None, "lm_head.weight", str(plain))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from draftsmith.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, "inspect", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


def test_json_is_all_of_stdout_and_a_problem_ends_in_exit_code_2(packed: Path, tiny_target: Path) -> None:
    good, bad = run(tiny_target, "--json"), run(packed, "--json")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout) == looked_at(tiny_target)
    assert bad.returncode == 2
    assert json.loads(bad.stdout)["problem"] in bad.stderr.replace("\n", " ")
    assert "Traceback" not in bad.stderr


def test_help_needs_no_torch() -> None:
    """Nor does any command line that is only read: torch and transformers take seconds to import."""
    code = "import sys, draftsmith.cli; draftsmith.cli.app(['--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_page_fits_and_breaks_no_path(made: Make, capsys: pytest.CaptureFixture[str], width: int) -> None:
    folder = made(Gemma2Config(**SIZES, head_dim=8), "a-directory-with-a-long-name-" * 4)
    found = looked_at(folder)
    text = page(found, capsys, width)
    assert str(folder) in text.splitlines()[0]
    assert max(len(line) for line in text.splitlines() if str(folder) not in line) <= width
    assert "model.embed_tokens.weight" in text
    assert all(" ".join(c.split()) in " ".join(text.split()) for c in found["concerns"])


def test_a_target_without_concerns_says_so(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tiny_config(num_hidden_layers=8, vocab_size=9000), "sound")
    found = looked_at(folder)
    assert [c for c in found["concerns"] if "padding" not in c] == []
    assert "Nothing is known that could go wrong" in page(found | {"concerns": []}, capsys)
    assert "Nothing is known that could go wrong" not in page(found, capsys)
