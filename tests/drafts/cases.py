"""Small drafts, targets and documents for the tests of EAGLE-3, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from hypothesis import strategies as st
from reference import own_logits
from torch import Tensor

from draftsmith.core.types import IGNORED, Features, Progress, Ratio, Sample, StepOutput, TargetShape
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.features.pack import pack
from draftsmith.target.families import LogitRule
from draftsmith.target.weights import Target

EXACT = Progress(exact=True)
SHAPE = TargetShape(
    hidden_size=12, vocab_size=19, layers=5, heads=4, kv_heads=2, head_dim=6, intermediate_size=10, norm_eps=1e-5, max_positions=64,
    rope={"rope_type": "default", "rope_theta": 100.0}, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
"""heads x head_dim differs from the hidden size, and nothing else is equal either."""
PLAIN = LogitRule()


def spans() -> st.SearchStrategy[list[bool]]:
    """Masks of 1 to 12 tokens: any pattern, or a few long spans."""
    span = st.tuples(st.booleans(), st.integers(1, 8)).map(lambda s: [s[0]] * s[1])
    return st.one_of(
        st.lists(st.booleans(), min_size=1, max_size=12),
        st.lists(span, min_size=1, max_size=4).map(lambda parts: [m for part in parts for m in part][:12]),
    )


def random_target(seed: int, dtype: torch.dtype = torch.float64, shape: TargetShape = SHAPE, rule: LogitRule = PLAIN, bias: bool = False) -> Target:
    """Embedding and head differ; the head is flat enough that every token is some token's most likely one."""
    g = torch.Generator().manual_seed(seed)
    embedding, head = (torch.randn(shape.vocab_size, shape.hidden_size, generator=g, dtype=dtype) for _ in range(2))
    norm = torch.rand(shape.hidden_size, generator=g, dtype=dtype) + 0.5
    bias_V = torch.randn(shape.vocab_size, generator=g, dtype=dtype) if bias else None
    return Target("random", shape, embedding, head, bias_V, norm, rule, tied=False, config=None, found=None, places=())  # type: ignore[arg-type]


def random_document(mask: Sequence[bool], target: Target, layers: int, g: torch.Generator, dtype: torch.dtype = torch.float64) -> Features:
    """Random tokens and features under this mask; the arg-max as `Capture` leaves it."""
    n, size = len(mask), target.shape.hidden_size
    mask_T = torch.tensor(list(mask), dtype=torch.bool)
    last_TH = torch.randn(n, size, generator=g, dtype=torch.float64).to(dtype)
    argmax_T = torch.full((n,), IGNORED, dtype=torch.int32)
    best = torch.tensor([int(own_logits(target, last).argmax()) for last in last_TH])
    argmax_T[:-1][mask_T[1:]] = best[:-1][mask_T[1:]].int()
    tokens = torch.randint(target.shape.vocab_size, (n,), generator=g)
    hidden_TF = (3 * torch.randn(n, layers * size, generator=g, dtype=torch.float64)).to(dtype)
    return Features(Sample(f"random-{n}", tokens, mask_T), hidden_TF, last_TH, argmax_T)


def random_documents(masks: Sequence[Sequence[bool]], target: Target, seed: int, layers: int = 2) -> list[Features]:
    g = torch.Generator().manual_seed(seed)
    return [random_document(mask, target, layers, g) for mask in masks]


def exact_frequencies(draft: Eagle3) -> Tensor:
    """Rotary frequencies in float64 (the draft's own are float32, as engines have them)."""
    exponent = torch.arange(0, draft.shape.head_dim, 2, dtype=torch.float64) / draft.shape.head_dim
    return draft.shape.rope["rope_theta"] ** -exponent


def random_draft(seed: int, dtype: torch.dtype = torch.float64, shape: TargetShape = SHAPE, **config: object) -> Eagle3:
    """Every weight random, norms included; a random draft vocabulary; feature constants that are different powers of two."""
    draft = Eagle3(Eagle3Config(**({"layers": (1, 3), "vocab_size": 9} | config)), shape).to(dtype)
    if dtype == torch.float64:
        torch.testing.assert_close(draft.rope.inverse, exact_frequencies(draft), rtol=1e-6, atol=0)
        draft.rope.inverse = exact_frequencies(draft)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * parameter.shape[-1] ** -0.5 + (parameter.dim() == 1))
        size = draft.config.vocab_size
        chosen = torch.randperm(shape.vocab_size, generator=g)[:size].sort().values
        draft.d2t.copy_(chosen - torch.arange(size))
        draft.t2d.zero_()[chosen] = True
        draft.feature_scale.copy_(2.0 ** torch.randint(-1, 4, (len(draft.layers),), generator=g))
    return draft


def run(draft: Eagle3, documents: Sequence[Features], target: Target, progress: Progress = EXACT) -> StepOutput:
    return draft(pack(documents), target, progress)


def gradients(draft: Eagle3, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter; zeros where the loss does not reach."""
    found = torch.autograd.grad(loss, list(draft.parameters()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(draft.named_parameters(), found, strict=True)}


def added(outputs: Sequence[StepOutput]) -> dict[str, Ratio]:
    """Metrics summed over outputs; one that had nothing to report adds nothing."""
    total: dict[str, Ratio] = {}
    for output in outputs:
        for name, ratio in output.metrics.items():
            total[name] = total[name] + ratio if name in total else ratio
    return total


def close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rtol: float = 1e-8, atol: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
