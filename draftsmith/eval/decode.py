"""Speculative decoding of a chain of drafted tokens, lossless, for one prompt or a batch of them.

Plain decoding is the case without a draft: the given token alone is verified. Rows of a batch accept different numbers of tokens; what a row rejected
stays in the caches as an invalid place that masks hide, and places at the end that no row holds are dropped. For one row that is plain cropping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftsmith.drafts.base import GREEDY, Context, Draft, DraftState, Sampling
from draftsmith.eval.verify import verify_greedy, verify_sampled
from draftsmith.target.model import States, TargetModel
from draftsmith.target.weights import Target


@dataclass
class Decoded:
    """One answer: its tokens (end token included), how many drafted tokens each verification pass accepted, and why it ended."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass
class Clock:
    """Seconds spent in the parts of decoding, and passes of each."""

    prefill: float = 0.0
    verify: float = 0.0
    draft: float = 0.0
    passes: int = 0


@dataclass(frozen=True)
class Decoder:
    """A target, perhaps with a draft of `width` tokens; the end tokens stop an answer."""

    model: TargetModel
    target: Target
    end_ids: tuple[int, ...]
    draft: Draft | None = None
    width: int = 0
    sampling: Sampling = GREEDY

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], max_new: int, clock: Clock | None = None) -> list[Decoded]:
        """Answers to all prompts, decoded together; one by one where the model cannot hide places, or the window of some blocks could end inside an answer."""
        clock = clock or Clock()
        window, reach = self.model.window, max(map(len, prompts), default=0) + max_new * (self.width + 1)
        # Rows of a batch have gaps; windows are masked by places.
        if len(prompts) > 1 and (not self.model.takes_masks or (window is not None and reach > window)):
            return [self.decode([prompt], max_new, clock)[0] for prompt in prompts]
        rows = _Rows.start(self, prompts, max_new, clock)
        while len(rows.alive):
            rows.advance()
        return rows.answers

    @property
    def layers(self) -> tuple[int, ...]:
        """Blocks to tap."""
        return () if self.draft is None else tuple(self.draft.layers)

    def choose(self, logits: Tensor) -> Tensor:
        """The target's own next token."""
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        probs = torch.softmax(logits.float() / self.sampling.temperature, dim=-1)
        return torch.multinomial(probs, 1, generator=self.sampling.generator)[:, 0]


@dataclass
class _Rows:
    """Rows still being decoded. `valid_BT`: places of the target's cache that hold real tokens; `length_B`: tokens before `given_B`."""

    decoder: Decoder
    answers: list[Decoded]
    alive: Tensor
    max_new: int
    clock: Clock
    cache: Cache
    valid_BT: Tensor
    length_B: Tensor
    given_B: Tensor
    context: Context | None = None
    state: DraftState | None = None

    @staticmethod
    def start(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new: int, clock: Clock) -> _Rows:
        """Run the target over the prompts; its next token is the first given one."""
        began = time.perf_counter()
        device = decoder.model.device
        length_B = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(length_B.max())
        ids_BT = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        for i, prompt in enumerate(prompts):
            ids_BT[i, : len(prompt)] = torch.tensor(list(prompt), device=device)
        place_T = torch.arange(longest, device=device)
        valid_BT = place_T < length_B[:, None]
        cache = decoder.model.new_cache()
        mask = None if bool(valid_BT.all()) else (place_T <= place_T[:, None]).expand(len(prompts), 1, -1, -1)
        states = decoder.model.run(ids_BT, decoder.layers, place_T.expand(len(prompts), -1), mask, cache)
        last_BH = states.last_BQH[torch.arange(len(prompts)), length_B - 1]
        given_B = decoder.choose(decoder.target.logits(last_BH))
        rows = _Rows(decoder, [Decoded() for _ in prompts], torch.arange(len(prompts)), max_new, clock, cache, valid_BT, length_B, given_B)
        if decoder.draft is not None:
            assert states.hidden_BQF is not None
            following_BT = torch.cat((ids_BT[:, 1:], ids_BT[:, :1]), dim=1)
            following_BT[torch.arange(len(prompts)), length_B - 1] = given_B
            rows.context = Context(states.hidden_BQF, following_BT, place_T.expand(len(prompts), -1), valid_BT)
            rows.state = decoder.draft.start(len(prompts))
        clock.prefill += time.perf_counter() - began
        rows._emit([[t] for t in given_B.tolist()], None)
        return rows

    def advance(self) -> None:
        """One draft, one verification pass."""
        began = time.perf_counter()
        drafted_BW, probs_BWV = self._propose()
        drawn = time.perf_counter()
        states, first = self._verify(drafted_BW)
        logits_BQV = self.decoder.target.logits(states.last_BQH)
        accepted_B, next_B = self._accept(logits_BQV, drafted_BW, probs_BWV)
        self._remember(states, first, drafted_BW, accepted_B, next_B)
        self.clock.draft += drawn - began
        self.clock.verify += time.perf_counter() - drawn
        self.clock.passes += 1
        tokens = torch.cat((drafted_BW, next_B[:, None]), dim=1).tolist()
        counts = accepted_B.tolist()
        emitted = [[*row[:n], row[-1]] for row, n in zip(tokens, counts, strict=True)]
        self._emit(emitted, counts)

    def _propose(self) -> tuple[Tensor, Tensor | None]:
        draft = self.decoder.draft
        if draft is None:
            return self.given_B.new_empty(len(self.given_B), 0), None
        assert self.context is not None
        proposal = draft.propose(self.context, self.state, self.decoder.target, self.decoder.width, self.decoder.sampling)
        return proposal.tokens_BW, proposal.probs_BWV

    def _verify(self, drafted_BW: Tensor) -> tuple[States, int]:
        ids_BQ = torch.cat((self.given_B[:, None], drafted_BW), dim=1)
        rows, query = ids_BQ.shape
        first = self.valid_BT.shape[1]
        order = torch.arange(query, device=ids_BQ.device)
        mask = None
        if not bool(self.valid_BT.all()):
            old = self.valid_BT[:, None].expand(-1, query, -1)
            new = (order <= order[:, None]).expand(rows, -1, -1)
            mask = torch.cat((old, new), dim=2)[:, None]
        return self.decoder.model.run(ids_BQ, self.decoder.layers, self.length_B[:, None] + order, mask, self.cache), first

    def _accept(self, logits_BQV: Tensor, drafted_BW: Tensor, probs_BWV: Tensor | None) -> tuple[Tensor, Tensor]:
        sampling = self.decoder.sampling
        if sampling.temperature == 0:
            return verify_greedy(logits_BQV.argmax(-1), drafted_BW)
        target_BQV = torch.softmax(logits_BQV.float() / sampling.temperature, dim=-1)
        if probs_BWV is None:
            assert not drafted_BW.shape[1], "a draft that samples must return the distributions it drew from"
            probs_BWV = target_BQV[:, :0]
        uniform_BW = torch.rand(drafted_BW.shape, generator=sampling.generator, device=drafted_BW.device)
        return verify_sampled(target_BQV, probs_BWV, drafted_BW, uniform_BW, sampling.generator)

    def _remember(self, states: States, first: int, drafted_BW: Tensor, accepted_B: Tensor, next_B: Tensor) -> None:
        """Mark what was accepted, drop places that no row holds, and keep what the next proposal needs."""
        order = torch.arange(drafted_BW.shape[1] + 1, device=accepted_B.device)
        kept_BQ = order <= accepted_B[:, None]
        self.valid_BT = torch.cat((self.valid_BT, kept_BQ), dim=1)
        longest = first + int(accepted_B.max()) + 1
        if longest < self.valid_BT.shape[1]:
            self.cache.crop(longest - self.valid_BT.shape[1])
            self.valid_BT = self.valid_BT[:, :longest]
        if self.decoder.draft is not None:
            assert states.hidden_BQF is not None
            following_BQ = torch.cat((drafted_BW, next_B[:, None]), dim=1)
            following_BQ[torch.arange(len(next_B)), accepted_B] = next_B
            self.context = Context(states.hidden_BQF, following_BQ, self.length_B[:, None] + order, kept_BQ)
        self.length_B = self.length_B + accepted_B + 1
        self.given_B = next_B

    def _emit(self, tokens: list[list[int]], accepted: list[int] | None) -> None:
        """Append tokens up to an end token or the limit; rows that ended leave the batch."""
        going: list[int] = []
        for i, row in enumerate(self.alive.tolist()):
            answer = self.answers[row]
            fresh = tokens[i][: self.max_new - len(answer.token_ids)]
            ends = [n for n, token in enumerate(fresh) if token in self.decoder.end_ids]
            fresh = fresh[: ends[0] + 1] if ends else fresh
            answer.token_ids += fresh
            if accepted is not None:
                answer.accepted.append(min(accepted[i], len(fresh)))
            if ends:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) < self.max_new:
                going.append(i)
        if len(going) < len(self.alive):
            self._select(torch.tensor(going, dtype=torch.long, device=self.given_B.device))

    def _select(self, rows: Tensor) -> None:
        self.alive = self.alive[rows.cpu()]
        if not len(rows):
            return
        self.cache.batch_select_indices(rows)
        self.valid_BT, self.length_B, self.given_B = self.valid_BT[rows], self.length_B[rows], self.given_B[rows]
        if self.context is not None and self.state is not None:
            c = self.context
            self.context = Context(c.hidden_BRF[rows], c.next_BR[rows], c.position_BR[rows], c.valid_BR[rows])
            self.state.select(rows)
