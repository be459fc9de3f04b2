"""Speculative decoding of drafted chains and trees, lossless, for one prompt or a batch of them.

Plain decoding is the case without a draft: the given token alone is verified. A chain is the tree with one branch. Of a tree the accepted branch is moved
to the front of its places in the cache. Rows of a batch accept different numbers of tokens: where a row accepted fewer than another, its places stay in
the caches as invalid ones that masks hide. For one row nothing stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftsmith.core.types import Proposal
from draftsmith.drafts.base import GREEDY, Context, Draft, DraftState, Sampling, Tree, Width, depth, drafted
from draftsmith.eval.verify import verify_choice, verify_sampled
from draftsmith.target.cache import keep_places
from draftsmith.target.model import States, TargetModel
from draftsmith.target.weights import Target


@dataclass(frozen=True)
class Pass:
    """What one verification pass was given and kept: drafted tokens, their parents (empty: a chain), and the places of the accepted ones."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass
class Decoded:
    """One answer: its tokens (end token included), how many drafted tokens each verification pass accepted, why it ended, and what was drafted."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    passes: list[Pass] = field(default_factory=list, compare=False)


@dataclass
class Clock:
    """Seconds spent in the parts of decoding: on the prompts, and on drafting and verifying in each pass."""

    prefill: float = 0.0
    verify: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Verification passes."""
        return len(self.verify)


@dataclass(frozen=True)
class Decoder:
    """A target, perhaps with a draft that drafts `width`; the end tokens stop an answer."""

    model: TargetModel
    target: Target
    end_ids: tuple[int, ...]
    draft: Draft | None = None
    width: Width = 0
    sampling: Sampling = GREEDY

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], max_new: int, clock: Clock | None = None) -> list[Decoded]:
        """Answers to all prompts, decoded together; one by one where the model cannot hide places, or the window of some blocks could end inside an answer.

        Raises ValueError with the reason for a tree that this target or draft cannot be given.
        """
        reason = self.no_trees(max(map(len, prompts), default=0), max_new) if isinstance(self.width, Tree) else None
        if reason is not None:
            raise ValueError(f"no trees here: {reason}. Draft chains instead (leave eval.tree out)")
        clock = clock or Clock()
        if len(prompts) > 1 and not self.together(self.reach(max(map(len, prompts)), max_new)):
            return [self.decode([prompt], max_new, clock)[0] for prompt in prompts]
        rows = Rows.start(self, prompts, max_new, clock)
        while len(rows.alive):
            rows.advance()
        return rows.answers

    def reach(self, prompt: int, max_new: int) -> int:
        """The most places that the cache of a row can have: each pass may leave as many as its longest branch, and the last one holds all it drafted."""
        return prompt + max_new * (depth(self.width) + 1) + drafted(self.width) - depth(self.width)

    def together(self, places: int) -> bool:
        """Whether prompts can be decoded together in a cache of so many places: rows of a batch have gaps, which masks hide, and close windows by places."""
        return self.model.takes_masks and (self.model.window is None or places <= self.model.window)

    def no_trees(self, longest: int, max_new: int) -> str | None:
        """Why no trees can be decoded behind prompts of up to `longest` tokens; None when they can."""
        if self.draft is not None and not self.draft.trees:
            return f"{type(self.draft).__name__} drafts chains only"
        if not self.model.takes_masks:
            return f"{type(self.model.speaker).__name__} counts positions by places and takes no masks, so that branches would disturb each other"
        window, reach = self.model.window, self.reach(longest, max_new)
        if window is not None and reach > window:
            return f"prompts and answers may take {reach:,} places, more than the window of {window:,} tokens of some blocks, which masks close by places"
        return None

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
class Rows:
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
    def start(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new: int, clock: Clock) -> Rows:
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
        rows = Rows(decoder, [Decoded() for _ in prompts], torch.arange(len(prompts)), max_new, clock, cache, valid_BT, length_B, given_B)
        if decoder.draft is not None:
            assert states.hidden_BQF is not None
            following_BT = torch.cat((ids_BT[:, 1:], ids_BT[:, :1]), dim=1)
            following_BT[torch.arange(len(prompts)), length_B - 1] = given_B
            rows.context = Context(states.hidden_BQF, following_BT, place_T.expand(len(prompts), -1), valid_BT)
            rows.state = decoder.draft.start(len(prompts))
        clock.prefill += time.perf_counter() - began
        rows._emit([[t] for t in given_B.tolist()], None)
        return rows

    def advance(self, width: Width | None = None) -> None:
        """One draft, of the decoder's width if no other is given, and one verification pass."""
        began = time.perf_counter()
        proposal = self._propose(self.decoder.width if width is None else width)
        drawn = time.perf_counter()
        lineage_BQQ = proposal.lineage
        ids_BQ = torch.cat((self.given_B[:, None], proposal.tokens_BW), dim=1)
        states, first = self._verify(ids_BQ, lineage_BQQ, proposal.parent_BW is not None)
        kept_BQ, next_B = self._accept(self.decoder.target.logits(states.last_BQH), proposal, lineage_BQQ)
        path_BK, count_B = self._remember(states, first, ids_BQ, kept_BQ, next_B, proposal.parent_BW is not None)
        self.clock.draft.append(drawn - began)
        self.clock.verify.append(time.perf_counter() - drawn)
        self._record(proposal, path_BK, count_B, next_B)

    def _propose(self, width: Width) -> Proposal:
        draft = self.decoder.draft
        if draft is None:
            return Proposal(self.given_B.new_empty(len(self.given_B), 0))
        assert self.context is not None
        return draft.propose(self.context, self.state, self.decoder.target, width, self.decoder.sampling)

    def _verify(self, ids_BQ: Tensor, lineage_BQQ: Tensor, branched: bool) -> tuple[States, int]:
        first, mask = self.valid_BT.shape[1], None
        if branched or not bool(self.valid_BT.all()):
            old = self.valid_BT[:, None].expand(-1, ids_BQ.shape[1], -1)
            mask = torch.cat((old, lineage_BQQ), dim=2)[:, None]
        position_BQ = self.length_B[:, None] + lineage_BQQ.sum(2) - 1
        return self.decoder.model.run(ids_BQ, self.decoder.layers, position_BQ, mask, self.cache), first

    def _accept(self, logits_BQV: Tensor, proposal: Proposal, lineage_BQQ: Tensor) -> tuple[Tensor, Tensor]:
        sampling = self.decoder.sampling
        if sampling.temperature == 0:
            return verify_choice(logits_BQV.argmax(-1), proposal.tokens_BW, proposal.parent_BW, lineage_BQQ)
        target_BQV = torch.softmax(logits_BQV.float() / sampling.temperature, dim=-1)
        if proposal.probs_BWV is None:
            choice_BQ = torch.multinomial(target_BQV.flatten(0, 1), 1, generator=sampling.generator).view(logits_BQV.shape[:2])
            return verify_choice(choice_BQ, proposal.tokens_BW, proposal.parent_BW, lineage_BQQ)
        assert proposal.parent_BW is None, "a tree is chosen, not drawn"
        uniform_BW = torch.rand(proposal.tokens_BW.shape, generator=sampling.generator, device=logits_BQV.device)
        accepted_B, next_B = verify_sampled(target_BQV, proposal.probs_BWV, proposal.tokens_BW, uniform_BW, sampling.generator)
        return torch.arange(logits_BQV.shape[1], device=next_B.device) <= accepted_B[:, None], next_B

    def _remember(self, states: States, first: int, ids_BQ: Tensor, kept_BQ: Tensor, next_B: Tensor, branched: bool) -> tuple[Tensor, Tensor]:
        """Keep the accepted branches at the front of the new places, and what the next proposal needs. Returns the branches (the given token first) and their
        lengths."""
        count_B = kept_BQ.sum(1)
        longest = int(count_B.max())
        path_BK = kept_BQ.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
        order_K = torch.arange(longest, device=ids_BQ.device)
        real_BK = order_K < count_B[:, None]
        self.valid_BT = torch.cat((self.valid_BT, real_BK), dim=1)
        if branched:
            keep_places(self.cache, first, path_BK)
        elif longest < ids_BQ.shape[1]:
            self.cache.crop(longest - ids_BQ.shape[1])
        if self.decoder.draft is not None:
            assert states.hidden_BQF is not None
            hidden_BKF = states.hidden_BQF.gather(1, path_BK[..., None].expand(-1, -1, states.hidden_BQF.shape[2]))
            following_BK = ids_BQ.gather(1, path_BK).roll(-1, dims=1)
            following_BK[torch.arange(len(next_B)), count_B - 1] = next_B
            self.context = Context(hidden_BKF, following_BK, self.length_B[:, None] + order_K, real_BK)
        self.length_B = self.length_B + count_B
        self.given_B = next_B
        return path_BK, count_B

    def _record(self, proposal: Proposal, path_BK: Tensor, count_B: Tensor, next_B: Tensor) -> None:
        """Emit what was accepted and the target's own token, and note the passes."""
        tokens, following = proposal.tokens_BW.tolist(), next_B.tolist()
        parents = [()] * len(tokens) if proposal.parent_BW is None else proposal.parent_BW.tolist()
        paths = [[place - 1 for place in path[1:n]] for path, n in zip(path_BK.tolist(), count_B.tolist(), strict=True)]
        passes = [Pass(tuple(t), tuple(p), tuple(a)) for t, p, a in zip(tokens, parents, paths, strict=True)]
        self._emit([[*(row[w] for w in path), last] for row, path, last in zip(tokens, paths, following, strict=True)], passes)

    def _emit(self, tokens: list[list[int]], passes: list[Pass] | None) -> None:
        """Append tokens up to an end token or the limit; rows that ended leave the batch."""
        going: list[int] = []
        for i, row in enumerate(self.alive.tolist()):
            answer = self.answers[row]
            fresh = tokens[i][: self.max_new - len(answer.token_ids)]
            ends = [n for n, token in enumerate(fresh) if token in self.decoder.end_ids]
            fresh = fresh[: ends[0] + 1] if ends else fresh
            answer.token_ids += fresh
            if passes is not None:
                emitted = passes[i].accepted[: len(fresh)]
                answer.accepted.append(len(emitted))
                answer.passes.append(replace(passes[i], accepted=emitted))
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
