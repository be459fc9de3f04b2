"""Differential test: odd checkpoints give exactly what the head rule demands, or an error that names the problem; never a wrong head."""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from odd import FAMILIES, Case, Truth, cases, write
from torch import Tensor

from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 58, 41, 2, 60]])
NAMES = {
    "misshapen": r"config\.json makes it|could be the",
    "missing": r"no (embedding|final norm|head bias) found.*closest keys",
    "swapped": r"says that .* holds .* and it does not",
    "lost": r"names .* which is not there",
}
"""What an error must say of each fault."""


def check(case: Case, folder: Path) -> None:
    """The rule's tensors, or the named error; and transformers' own logits where it loads the files without a gap."""
    truth = write(case, folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if truth.faults:
            with pytest.raises(ValueError, match=rf"(?s){re.escape(str(folder))}.*({'|'.join(NAMES[f] for f in truth.faults)})"):
                Target.load(str(folder))
            return
        target = Target.load(str(folder))
    require_equal(target, truth, FAMILIES[case.family].shifted)
    assert target.tied or case.head != "absent"
    if truth.warns is not None:
        assert any("differs from" in str(w.message) for w in told) == truth.warns
    own = transformers_logits(case, folder)
    if own is not None:
        torch.testing.assert_close(target.logits(own[0]), own[1], rtol=1e-5, atol=1e-5)


def require_equal(target: Target, truth: Truth, shifted: float) -> None:
    assert torch.equal(target.embedding_VH, truth.parts["embedding"])
    assert torch.equal(target.head_VH, truth.parts["head"])
    assert torch.equal(target.norm_H, truth.parts["norm"] + shifted)
    assert (target.bias_V is None) == ("bias" not in truth.parts)
    assert target.bias_V is None or torch.equal(target.bias_V, truth.parts["bias"])


def transformers_logits(case: Case, folder: Path) -> tuple[Tensor, Tensor] | None:
    """What the head multiplies, and the logits; None where transformers would make up a tensor."""
    try:
        model, info = FAMILIES[case.family].auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, RuntimeError, ValueError):
        return None
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
    return seen[0], logits


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_the_outcome_is_the_rules_or_a_named_error(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(case, Path(folder))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_transformers_loads_and_agrees_on_plain_checkpoints(family: str, head: str, tmp_path: Path) -> None:
    """Else the comparison with transformers in the test above might never have been made."""
    case = Case(family, head, "absent", None, frozenset(), None, None, 2, ".safetensors", None, 0)
    check(case, tmp_path)
    expected = head != "absent" or FAMILIES[family].tied
    assert (transformers_logits(case, tmp_path) is not None) == expected
