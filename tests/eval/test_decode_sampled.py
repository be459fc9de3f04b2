"""Speculative sampling against the target's exact distribution, enumerated by forward passes on a vocabulary of twelve."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from chi_square import p_value
from scripted import LAYERS, Rows, Scripted
from tiny import tiny_config
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.core.types import Proposal
from draftsmith.drafts.base import Context, Sampling, Tree, Width
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode
from draftsmith.eval.decode import Decoded, Decoder
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

VOCABULARY = 12
PROMPT = [3, 1, 4]
ROWS = 6_000
TOKENS = 3
LIMIT = 1e-4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Target]:
    folder = tmp_path_factory.mktemp("target") / "twelve"
    torch.manual_seed(3)
    LlamaForCausalLM(tiny_config(vocab_size=VOCABULARY, num_hidden_layers=4)).save_pretrained(folder)
    return TargetModel.load(str(folder), torch.float32), Target.load(str(folder))


@pytest.fixture(scope="module")
def eagle3(small: tuple[TargetModel, Target]) -> Eagle3:
    """Untrained, and blind to four of the twelve tokens."""
    torch.manual_seed(1)
    draft = Eagle3(Eagle3Config(vocab_size=8, layers=(0, 1, 3)), small[1].shape).eval()
    draft.d2t.copy_(torch.tensor([1, 2, 3, 4, 5, 6, 7, 11]) - torch.arange(8))
    draft.t2d.zero_()[[1, 2, 3, 4, 5, 6, 7, 11]] = True
    draft.lm_head.weight.data *= 3
    return draft


def exact(small: tuple[TargetModel, Target], temperature: float, end: int | None = None) -> Tensor:
    """Probability of every answer of `TOKENS` tokens; what follows the end token is token 0, by convention."""
    model = small[0].model
    found = torch.zeros((VOCABULARY,) * TOKENS, dtype=torch.float64)
    texts = torch.tensor([[*PROMPT, *t] for t in itertools.product(range(VOCABULARY), repeat=TOKENS - 1)])
    with torch.inference_mode():
        probs = torch.softmax(model(input_ids=texts).logits.double() / temperature, -1)[:, len(PROMPT) - 1 :]
    for row, (a, b) in enumerate(itertools.product(range(VOCABULARY), repeat=2)):
        first, second, third = probs[row]
        if a == end:
            found[a, 0, 0] = first[a]
        elif b == end:
            found[a, b, 0] = first[a] * second[b]
        else:
            found[a, b] = first[a] * second[b] * third
    return found


def tally(answers: list[Decoded]) -> Tensor:
    ids = torch.tensor([(a.token_ids + [0] * TOKENS)[:TOKENS] for a in answers])
    place = ids @ torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    return torch.bincount(place, minlength=VOCABULARY**TOKENS)


def decoder(small: tuple[TargetModel, Target], draft: object, width: Width, temperature: float = 1.0, seed: int = 0, end_ids: tuple[int, ...] = ()) -> Decoder:
    return Decoder(*small, end_ids, draft, width, Sampling(temperature, torch.Generator().manual_seed(seed)))  # type: ignore[arg-type]


def test_plain_sampling_draws_from_the_target(small: tuple[TargetModel, Target]) -> None:
    assert p_value(tally(decoder(small, None, 0).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) > LIMIT


BUSHY, BROAD = Tree(nodes=7, top_k=3, depth=2), Tree(nodes=6, top_k=6, depth=1)


@pytest.mark.parametrize(
    ("width", "temperature"),
    [(1, 1.0), (2, 1.0), (3, 1.0), (3, 0.6), (2, 1.7), (BUSHY, 1.0), (BUSHY, 0.6), (BROAD, 1.7), (Tree(nodes=3, top_k=1, depth=3), 1.0)],
)
def test_speculative_sampling_draws_from_the_target(small: tuple[TargetModel, Target], eagle3: Eagle3, width: Width, temperature: float) -> None:
    answers = decoder(small, eagle3, width, temperature).decode([PROMPT] * ROWS, TOKENS)
    assert p_value(tally(answers), exact(small, temperature)) > LIMIT
    passes = [n for a in answers for n in a.accepted]
    assert 0.05 < sum(n > 0 for n in passes) / len(passes) < 0.95, "both acceptance and rejection were tried"


def test_speculative_sampling_with_an_end_token_draws_from_the_target_that_stops(small: tuple[TargetModel, Target], eagle3: Eagle3) -> None:
    probs = exact(small, 1.0).sum(2)
    end = int((probs.sum(0) * (probs.sum(1) > 0)).argmax())
    answers = decoder(small, eagle3, 2, end_ids=(end,)).decode([PROMPT] * ROWS, TOKENS)
    assert p_value(tally(answers), exact(small, 1.0, end)) > LIMIT
    assert all((a.finish_reason == "stop") == (a.token_ids[-1] == end) for a in answers)
    assert all(end not in a.token_ids[:-1] for a in answers)


class Stubborn(Scripted):
    """Proposes the same token with certainty, in all rows and places."""

    def propose(self, context: Context, state: Rows, target: Target, width: int, sampling: Sampling) -> Proposal:
        tokens_BW = torch.full((len(context.next_BR), width), 7)
        return Proposal(tokens_BW, torch.nn.functional.one_hot(tokens_BW, VOCABULARY).float())


def test_a_draft_without_any_doubt_does_not_bend_the_distribution(small: tuple[TargetModel, Target]) -> None:
    draft = Stubborn(small[0], [PROMPT] * ROWS, lambda *_: 0, LAYERS)
    assert p_value(tally(decoder(small, draft, 2).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) > LIMIT


def test_another_temperature_is_another_distribution(small: tuple[TargetModel, Target], eagle3: Eagle3) -> None:
    """Else the test could not tell temperatures apart."""
    assert p_value(tally(decoder(small, eagle3, 2, 0.7).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) < LIMIT


Verified = tuple[Tensor, Tensor]


def accept_all(target: Tensor, draft: Tensor, drafted: Tensor, uniform: Tensor, generator: torch.Generator | None) -> Verified:
    return torch.full((len(drafted),), drafted.shape[1]), torch.multinomial(target[:, -1], 1, generator=generator)[:, 0]


def replace_from_target(target: Tensor, draft: Tensor, drafted: Tensor, uniform: Tensor, generator: torch.Generator | None) -> Verified:
    """The residual is not taken: after a rejection the token comes from the target itself."""
    chance = target[:, :-1].gather(2, drafted[..., None])[..., 0] / draft.gather(2, drafted[..., None])[..., 0]
    accepted = (uniform < chance).cumprod(1).sum(1)
    return accepted, torch.multinomial(target[torch.arange(len(target)), accepted], 1, generator=generator)[:, 0]


def shifted(target: Tensor, draft: Tensor, drafted: Tensor, uniform: Tensor, generator: torch.Generator | None) -> Verified:
    """Each drafted token is judged one place late."""
    return decode_verify(torch.cat((target[:, 1:], target[:, -1:]), 1), draft, drafted, uniform, generator)


decode_verify = decode.verify_sampled


@pytest.mark.parametrize("fault", [accept_all, replace_from_target, shifted])
def test_a_wrong_verifier_is_seen(small: tuple[TargetModel, Target], eagle3: Eagle3, fault: Callable[..., Verified], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults."""
    monkeypatch.setattr(decode, "verify_sampled", fault)
    assert p_value(tally(decoder(small, eagle3, 2).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) < LIMIT


def first_branch(choice: Tensor, drafted: Tensor, parent: Tensor, lineage: Tensor) -> Verified:
    """Sampling that forgets chance: the likeliest token is taken whatever the target drew."""
    choice = choice.clone()
    choice[:, 0] = drafted[:, 0]
    return decode_choice(choice, drafted, parent, lineage)


def late(choice: Tensor, drafted: Tensor, parent: Tensor, lineage: Tensor) -> Verified:
    """Branches are judged by what the target drew after the token itself."""
    return decode_choice(torch.cat((choice[:, 1:], choice[:, -1:]), 1), drafted, parent, lineage)


decode_choice = decode.verify_choice


@pytest.mark.parametrize("fault", [first_branch, late])
def test_a_wrong_verifier_of_trees_is_seen(
    small: tuple[TargetModel, Target], eagle3: Eagle3, fault: Callable[..., Verified], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults."""
    monkeypatch.setattr(decode, "verify_choice", fault)
    assert p_value(tally(decoder(small, eagle3, BUSHY).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) < LIMIT


def test_the_generator_alone_decides(small: tuple[TargetModel, Target], eagle3: Eagle3) -> None:
    one, two, other = (decoder(small, eagle3, 2, seed=s).decode([PROMPT] * 20, 12) for s in (4, 4, 5))
    assert one == two
    assert one != other


def test_a_temperature_near_zero_gives_the_greedy_text(small: tuple[TargetModel, Target], eagle3: Eagle3) -> None:
    greedy = Decoder(*small, ()).decode([PROMPT], 20)[0].token_ids
    assert decoder(small, eagle3, 3, 1e-4).decode([PROMPT] * 3, 20)[1].token_ids == greedy
