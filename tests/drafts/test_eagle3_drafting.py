"""Drafting with a cache against the reference without one, and what a draft ships."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from cases import SHAPE, random_documents, random_draft, random_target, run
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from torch import Tensor

from draftsmith.core.types import Features, Proposal
from draftsmith.drafts.base import Context, Sampling
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.features.pack import pack
from draftsmith.nn.attention import KeyValues
from draftsmith.target.weights import Target

some = settings(max_examples=40, deadline=None, derandomize=True)
GREEDY = Sampling()


def context(documents: list[Features], starts: list[int], counts: list[int]) -> Context:
    """The next `counts` tokens of each row, right-padded with rubbish as rejected tokens leave it."""
    g = torch.Generator().manual_seed(sum(starts))
    rows, longest = len(documents), max(counts)
    hidden = 100 * torch.randn(rows, longest, documents[0].hidden_TF.shape[1], generator=g, dtype=documents[0].hidden_TF.dtype)
    following = torch.randint(SHAPE.vocab_size, (rows, longest), generator=g)
    position = torch.tensor(starts)[:, None] + torch.arange(longest)
    valid = torch.arange(longest) < torch.tensor(counts)[:, None]
    for b, (document, start, count) in enumerate(zip(documents, starts, counts, strict=True)):
        hidden[b, :count] = document.hidden_TF[start : start + count]
        following[b, :count] = document.sample.input_ids[start + 1 : start + count + 1]
    return Context(hidden, following, position, valid)


def whole(documents: list[Features], draft: Eagle3, target: Target, width: int, sampling: Sampling = GREEDY) -> Proposal:
    counts = [len(d) - 1 for d in documents]
    return draft.propose(context(documents, [0] * len(documents), counts), draft.start(len(documents)), target, width, sampling)


@some
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 19),
    st.booleans(),
    st.integers(0, 9999),
)
def test_proposals_fed_in_pieces_equal_the_reference_from_scratch(pieces: list[list[int]], width: int, vocabulary: int, normed: bool, seed: int) -> None:
    """Row b gets pieces[b][n] tokens in round n; a row without a piece left leaves the batch, as an answer that ended does."""
    target, draft = random_target(seed), random_draft(seed, vocab_size=vocabulary, norm_before_residual=normed)
    documents = random_documents([[True] * (sum(p) + 1) for p in pieces], target, seed)
    reference, rows = Reference(draft, target), list(range(len(pieces)))
    state: KeyValues = draft.start(len(rows))
    for n in range(max(map(len, pieces))):
        staying = [i for i, b in enumerate(rows) if n < len(pieces[b])]
        if len(staying) < len(rows):
            state.select(torch.tensor(staying))
            rows = [rows[i] for i in staying]
        starts, counts = [sum(pieces[b][:n]) for b in rows], [pieces[b][n] for b in rows]
        proposal = draft.propose(context([documents[b] for b in rows], starts, counts), state, target, width, GREEDY)
        assert proposal.probs_BWV is None
        for i, b in enumerate(rows):
            known, tokens = starts[i] + counts[i], documents[b].sample.input_ids.tolist()
            want = reference.propose(documents[b].hidden_TF[:known], tokens[:known], tokens[known], width)
            assert proposal.tokens_BW[i].tolist() == want, f"round {n}, row {b}"


def test_drafting_repeats_what_training_predicts_when_the_text_goes_as_drafted() -> None:
    """A text made of the draft's own proposal: every training step of that chain must have the proposed token as its choice."""
    target, draft = random_target(2), random_draft(2, steps=4, vocab_size=SHAPE.vocab_size)
    (document,) = random_documents([[False] + [True] * 8], target, 2)
    hidden, tokens = document.hidden_TF, document.sample.input_ids.clone()
    prefix = Features(type(document.sample)("prefix", tokens[:5], document.sample.loss_mask[:5]), hidden[:5], document.last_TH[:5], document.argmax_T[:5])
    drafted = whole([prefix], draft, target, 4).tokens_BW[0]
    tokens[5:9] = drafted
    last = document.last_TH.clone()
    last[4:8] = 50 * target.head_VH[drafted] / target.head_VH[drafted].square().sum(-1, keepdim=True)
    argmax = document.argmax_T.clone()
    argmax[4:8] = drafted.int()
    text = Features(type(document.sample)("text", tokens, torch.arange(9) >= 4), hidden, last, argmax)
    metrics = run(draft, [text], target).metrics
    assert metrics["position_rates"].num.tolist() == [1, 1, 1, 1]
    assert float(metrics["acceptance_length"].value) == 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_proposals_come_with_the_distribution_of_the_reference(temperature: float) -> None:
    target, draft = random_target(3), random_draft(3)
    documents = random_documents([[True] * 5, [True] * 8], target, 3)
    reference = Reference(draft, target)
    proposal = whole(documents, draft, target, 3, Sampling(temperature, torch.Generator().manual_seed(0)))
    assert proposal.probs_BWV is not None
    for b, document in enumerate(documents):
        tokens, drafted = document.sample.input_ids.tolist(), proposal.tokens_BW[b].tolist()
        for k, logits in enumerate(reference.chain(document.hidden_TF, tokens, len(tokens) - 2, [tokens[-1], *drafted[:-1]])):
            want = torch.zeros(SHAPE.vocab_size, dtype=torch.float64)
            want[reference.ids] = torch.softmax(logits.detach() / temperature, dim=0)
            torch.testing.assert_close(proposal.probs_BWV[b, k].double(), want, rtol=1e-5, atol=1e-7)
            assert want[drafted[k]] > 0


def test_sampled_first_tokens_are_distributed_as_stated() -> None:
    target, draft = random_target(4), random_draft(4)
    documents = random_documents([[True] * 4], target, 4) * 4000
    proposal = whole(documents, draft, target, 2, Sampling(1.0, torch.Generator().manual_seed(0)))
    assert proposal.probs_BWV is not None
    want = proposal.probs_BWV[0, 0].double()
    got = torch.bincount(proposal.tokens_BW[:, 0], minlength=SHAPE.vocab_size) / 4000
    assert ((got - want).abs() <= 4.5 * (want * (1 - want) / 4000).sqrt() + 1e-9).all()
    assert int((want > 0.02).sum()) > 3


# ---- what is trained and what ships ----


def test_the_trainable_set_is_the_drafts_own_and_no_tensor_of_the_target() -> None:
    target, draft = random_target(0, torch.float32), Eagle3(Eagle3Config(layers=(0, 2), vocab_size=19), SHAPE)
    (document,) = random_documents([[True] * 8], target, 0)
    draft.initialise(target, torch.ones(19, dtype=torch.long), pack([document]))
    run(draft, [Features(document.sample, document.hidden_TF.float(), document.last_TH.float(), document.argmax_T)], target)
    assert {n.removesuffix(".weight") for n, _ in draft.named_parameters()} == {
        "fc", "input_layernorm", "hidden_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "norm", "lm_head",
    }  # fmt: skip
    own = {t.untyped_storage().data_ptr() for t in draft.state_dict().values()}
    assert not own & {t.untyped_storage().data_ptr() for t in (target.embedding_VH, target.head_VH, target.norm_H)}
    assert set(draft.state_dict()) - {n for n, _ in draft.named_parameters()} == {"d2t", "t2d", "feature_scale"}


def test_initialise_chooses_the_frequent_tokens_copies_rows_and_scales_by_powers_of_two() -> None:
    target, draft = random_target(1, torch.float32), Eagle3(Eagle3Config(layers=(0, 2), vocab_size=4), SHAPE)
    documents = random_documents([[True] * 8, [True] * 12], target, 1)
    for document in documents:
        document.hidden_TF[:, SHAPE.hidden_size :] *= 10
        document.hidden_TF[0] = 1e6  # attention sinks do not count
    counts = torch.zeros(19, dtype=torch.long)
    counts[[17, 2, 9]] = torch.tensor([5, 9, 1])
    facts = draft.initialise(target, counts, pack(documents))
    assert (draft.d2t + torch.arange(4)).tolist() == [0, 2, 9, 17]
    assert draft.t2d.nonzero()[:, 0].tolist() == [0, 2, 9, 17]
    assert torch.equal(draft.lm_head.weight, target.head_VH[[0, 2, 9, 17]])
    assert torch.equal(draft.norm.weight, target.norm_H)
    layers = torch.cat([d.hidden_TF[1:] for d in documents]).unflatten(1, (2, -1))
    rms = layers.square().mean((0, 2)).sqrt()
    assert torch.equal(draft.feature_scale.log2(), draft.feature_scale.log2().round())
    assert ((rms / draft.feature_scale).log2().abs() <= 0.5).all()
    assert draft.feature_scale[1] > draft.feature_scale[0]
    assert "100.00%" in str(facts)


def proposals(draft: Eagle3, target: Target) -> list[Tensor]:
    """Tokens and sampled distributions of float32 features."""
    documents = random_documents([[True] * 9, [True] * 6], target, 11)
    documents = [Features(d.sample, d.hidden_TF.float(), d.last_TH.float(), d.argmax_T) for d in documents]
    sampled = whole(documents, draft, target, 4, Sampling(1.0, torch.Generator().manual_seed(5)))
    assert sampled.probs_BWV is not None
    return [whole(documents, draft, target, 4).tokens_BW, sampled.tokens_BW, sampled.probs_BWV]


def test_a_shipped_draft_proposes_bit_for_bit_the_same() -> None:
    target, draft = random_target(12, torch.float32), random_draft(12, torch.float32)
    assert len(set(draft.feature_scale.tolist())) > 1
    state, layout = draft.plain_state(), draft.layout()
    assert set(state) == set(layout.names)
    fresh = Eagle3(draft.config, SHAPE)
    before = proposals(fresh, target)
    fresh.load_plain_state(state)
    fields = json.loads(json.dumps(dict(layout.config)))
    other = Eagle3.from_engine(fields, SHAPE, Eagle3Config(), Eagle3.published_layers(fields, SHAPE.layers))
    other.load_plain_state(state)
    want = proposals(draft, target)
    assert not torch.equal(before[2], want[2])
    for got in (proposals(fresh, target), proposals(other, target)):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert other.layers == draft.layers


def test_layout_gives_layer_ids_in_both_conventions() -> None:
    config = random_draft(0).layout().config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3]


def stale(first: Eagle3) -> Eagle3:
    """A copy of a draft whose vocabulary was written twice before it drafted."""
    first.load_state_dict(first.state_dict())
    proposals(first, random_target(13, torch.float32))
    return copy.deepcopy(first)


@pytest.mark.parametrize(("prepare", "assign"), [(copy.deepcopy, False), (stale, False), (lambda draft: draft, False), (lambda draft: draft, True)])
def test_a_draft_that_loads_another_vocabulary_drafts_its_ids(prepare: Callable[[Eagle3], Eagle3], assign: bool) -> None:
    """Target ids of the vocabulary are kept between calls; nothing of another vocabulary may stay."""
    target, first, second = random_target(13, torch.float32), random_draft(13, torch.float32), random_draft(14, torch.float32)
    assert not torch.equal(first.d2t, second.d2t)
    want = proposals(second, target)
    proposals(first, target)
    loaded = prepare(first)
    loaded.load_state_dict(copy.deepcopy(second.state_dict()), assign=assign)
    assert all(torch.equal(a, b) for a, b in zip(proposals(loaded, target), want, strict=True))


def test_training_goes_on_after_drafting() -> None:
    """Drafting runs in inference mode; what it leaves behind must not poison a later loss."""
    target = random_target(15)
    documents = random_documents([[False, *[True] * 8]], target, 15)
    untouched, used = random_draft(15), random_draft(15)
    whole(documents, used, target, 3)
    loss, want = run(used, documents, target).loss.num, run(untouched, documents, target).loss.num
    loss.backward()
    assert torch.equal(loss, want)
