"""The stages of a run, glued: each takes a recipe and leaves files in the run's folder that the next one picks up.

capture -> features/     train -> checkpoints/, metrics.jsonl, timing.jsonl     eval -> report.json     export -> export/
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftsmith.core import config as configs
from draftsmith.core.disk import write_text
from draftsmith.core.env import api_key, best_device, dtype_of
from draftsmith.core.log import progress, say
from draftsmith.core.types import FeatureSpec, Sample
from draftsmith.data import cache, vocab
from draftsmith.data.cache import ArrowSamples
from draftsmith.data.chat import AnswerSettings
from draftsmith.data.config import DataConfig, SourceConfig
from draftsmith.data.conversations import Conversation, Counts
from draftsmith.data.prepare import Figures, Job, open_job
from draftsmith.data.regenerate import Service, regenerate
from draftsmith.data.show import describe
from draftsmith.data.sources import chunks, open_source
from draftsmith.data.template import ChatTemplate
from draftsmith.drafts import DRAFTS, AnyDraftConfig
from draftsmith.drafts.base import Draft, Sampling
from draftsmith.eval import page, show
from draftsmith.eval.answers import record
from draftsmith.eval.decode import Decoder
from draftsmith.eval.prompts import Prompt, PromptSet, open_sets, read_all, spread
from draftsmith.eval.report import evaluate
from draftsmith.export import layouts
from draftsmith.export.read import assemble, empty, published, require_embedding
from draftsmith.features import files
from draftsmith.features.live import LiveSource
from draftsmith.features.source import Source
from draftsmith.recipe import Recipe
from draftsmith.target import smollm2
from draftsmith.target.capture import Capture
from draftsmith.target.config import TargetConfig
from draftsmith.target.finder import Keys
from draftsmith.target.model import TargetModel
from draftsmith.target.place import locate
from draftsmith.target.weights import Target
from draftsmith.train import checkpoint
from draftsmith.train.loop import Trainer

INITIAL_SAMPLES = 300
"""Samples whose features set what a draft derives from data before its first step."""


def resolved(target: TargetConfig) -> TargetConfig:
    """With `smollm2` replaced by the converted target of the quickstart. Raises ValueError when there is no such target."""
    if target.where == "smollm2":
        return target.model_copy(update={"where": str(smollm2.directory())})
    locate(target.where, target.revision)
    return target


def load_target(target: TargetConfig, device: str, dtype: torch.dtype | None) -> Target:
    """Embedding, norm and head: the one loader, under the settings of a resolved target."""
    return Target.load(target.where, device, dtype, revision=target.revision, head_from=target.head_from, keys=keys_of(target))


def keys_of(target: TargetConfig) -> Keys:
    """The tensor names that a user gave."""
    return Keys(target.embedding_key, target.head_key, target.norm_key)


def load_model(target: TargetConfig, device: str, dtype: torch.dtype) -> TargetModel:
    """The whole target."""
    return TargetModel.load(target.where, dtype, device, target.revision)


def load_template(target: TargetConfig, data: DataConfig | None = None, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Its tokenizer and chat template, with the variables that the settings and `variables` give the template."""
    data = data or DataConfig()
    switch = {} if data.thinking is None else {"enable_thinking": data.thinking, "thinking": data.thinking}
    return ChatTemplate.load(target.where, target.revision, data.template, switch | data.template_kwargs | dict(variables or {}))


@dataclass(frozen=True)
class Run:
    """A recipe with what its stages share, made when first needed."""

    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Where everything of the run lies."""
        return Path(self.recipe.run)

    @cached_property
    def chosen(self) -> TargetConfig:
        """The target, found."""
        return resolved(self.recipe.target)

    @cached_property
    def target(self) -> Target:
        """Embedding, norm and head, in the dtype that training computes in. Raises ValueError when the tokenizer writes ids that it does not have."""
        target = load_target(self.chosen, self.device, dtype_of(self.recipe.train.dtype, self.device))
        self.template.require_rows(target.shape.vocab_size, self.chosen.where)
        return target

    @cached_property
    def device(self) -> str:
        """Where training runs."""
        return best_device()

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's tokenizer."""
        return load_template(self.chosen, self.recipe.data)

    @cached_property
    def spec(self) -> FeatureSpec:
        """What the draft needs captured."""
        kind = DRAFTS[self.recipe.draft.kind]
        return replace(kind.needs(self.draft_config, self.target.shape), dtype=self.recipe.features.dtype)

    @cached_property
    def draft_config(self) -> AnyDraftConfig:
        """The recipe's settings of the draft; sizes, layers and vocabulary are those of draft.init_from. Raises ValueError when the recipe states others."""
        given = self.recipe.draft
        if given.init_from is None:
            return given
        found: AnyDraftConfig = empty(published(Path(given.init_from), weights=False), self.target.shape, given).config
        for name in sorted(given.model_fields_set):
            stated, there = getattr(given, name), getattr(found, name)
            if stated is not None and stated != there:
                raise ValueError(f"draft.{name} is {stated}, but {given.init_from} has {there}: leave draft.{name} out of the recipe")
        return found

    @cached_property
    def held_out(self) -> tuple[ArrowSamples, Figures]:
        """All held-out samples and what became of their rows."""
        return self._prepared("held-out", frozenset())

    @cached_property
    def train(self) -> tuple[ArrowSamples, Figures]:
        """All training samples; conversations that ask what a held-out one asks are not among them."""
        return self._prepared("train", self.held_out[0].asked)

    def _prepared(self, split: str, excluded: frozenset[bytes]) -> tuple[ArrowSamples, Figures]:
        found, figures = cache.prepare(open_job(self.recipe.data, self.template, split, excluded), title=split)
        say(f"{split}: {describe(found, figures)}")
        return found, figures

    def conversations(self, split: str) -> list[Conversation]:
        """Conversations (`train` or `held-out`) out of the recipe's sources; rows that are none are left out."""
        job = open_job(self.recipe.data, self.template, split)
        entries = (entry for chunk in chunks(job.sources) for entry in job.entries(chunk, Figures()))
        return [replace(entry.item, id=entry.name) for entry in entries if isinstance(entry.item, Conversation)]

    def samples(self, split: str, everything: bool = False) -> ArrowSamples:
        """Rendered and masked; of the training split data.limit conversations unless `everything`, of the held-out one data.held_out_features."""
        data = self.recipe.data
        found, _ = self.train if split == "train" else self.held_out
        return found.spread((None if everything else data.limit) if split == "train" else data.held_out_features)

    def new_draft(self) -> Draft:
        """With seeded weights, before `initialise`; or the one of draft.init_from."""
        torch.manual_seed(self.recipe.train.seed)
        if self.recipe.draft.init_from is not None:
            found = published(Path(self.recipe.draft.init_from))
            require_embedding(found, self.target.embedding_VH)
            return assemble(found, self.target.shape, self.recipe.draft).to(self.device)
        return DRAFTS[self.recipe.draft.kind](self.recipe.draft, self.target.shape).to(self.device)

    def capture(self) -> Capture:
        """The target, running. Checks the logit rule on a few tokens first."""
        features = self.recipe.features
        dtype = dtype_of(features.compute, self.device)
        return Capture(load_model(self.chosen, self.device, dtype), load_target(self.chosen, self.device, dtype), self.spec)

    def feature_folder(self, split: str) -> Path:
        """Folder of one split's feature files."""
        return Path(self.recipe.features.path or self.folder / "features") / split

    def identity(self, found: Sequence[Sample]) -> files.Identity:
        """What its feature files must be of."""
        template = hashlib.sha256(self.template.jinja().encode()).hexdigest()[:16]
        compute = str(dtype_of(self.recipe.features.compute, self.device)).removeprefix("torch.")
        return files.Identity.of(self.target.fingerprint, self.spec, compute, template, found)

    def save_recipe(self) -> None:
        """`run.yaml`: the resolved recipe."""
        write_text(self.folder / "run.yaml", "# The resolved recipe of this run: `draftsmith train run.yaml` continues or repeats it.\n" + self.resolved_recipe)

    @property
    def resolved_recipe(self) -> str:
        """YAML of all settings."""
        return configs.dump(self.recipe.model_copy(update={"draft": self.draft_config}))

    def best_draft(self) -> tuple[Draft, int]:
        """The best checkpoint's draft and step; without any, the draft of draft.init_from and step 0."""
        draft = self.new_draft()
        if self.recipe.draft.init_from is not None and not checkpoint.steps(self.folder):
            say(f"no checkpoint in {self.folder / 'checkpoints'}: the draft of {self.recipe.draft.init_from} is taken as it is, untrained by this run")
            return draft.eval(), 0
        step = checkpoint.best_step(self.folder)
        checkpoint.load_draft(self.folder, step, draft)
        return draft.eval(), step


def plain_decoder(target: TargetConfig, device: str, dtype: torch.dtype, template: ChatTemplate) -> Decoder:
    """The target alone."""
    return Decoder(load_model(target, device, dtype), load_target(target, device, dtype), template.end_ids)


def asked_of(prompts: str) -> tuple[list[Conversation], Counts]:
    """Every conversation of a file, a hub data set or a public set, ids made different, and what became of its rows."""
    job, figures = Job((open_source(SourceConfig(path=prompts), "train"),), DataConfig(), None), Figures()
    asked: list[Conversation] = []
    seen: dict[str, int] = {}
    for entry in (entry for chunk in chunks(job.sources) for entry in job.entries(chunk, figures)):
        if not isinstance(entry.item, Conversation):
            figures.counts.drop("that are rendered already", entry.where)
            continue
        name = entry.name
        while name in seen:
            seen[entry.name] += 1
            name = f"{entry.name}#{seen[entry.name]}"
        seen[name] = 1
        asked.append(replace(entry.item, id=name))
    if not asked:
        raise ValueError(f"{prompts} holds nothing to ask: {figures.counts.describe()}")
    return asked, figures.counts


def answer_locally(prompts: str, out: Path, target: str, settings: AnswerSettings, batch: int) -> None:
    """The target's answers to conversations, decoded on this machine in float32. Raises ValueError for settings that need a server."""
    if (settings.top_p, settings.token_ids) != (1.0, AnswerSettings.token_ids):
        raise ValueError("--local decodes greedily or at a temperature and always records token ids; --top-p and --token-ids need a server")
    (asked, rows), chosen = asked_of(prompts), resolved(TargetConfig(where=target))
    template, device = load_template(chosen, variables=settings.template_variables), best_device()
    decoder = plain_decoder(chosen, device, torch.float32, template)
    if settings.temperature:
        decoder = replace(decoder, sampling=Sampling(settings.temperature, torch.Generator(device)))
    record(asked, decoder, template, out, settings, batch, rows)


def answer_by_servers(prompts: str, out: Path, target: str | None, settings: AnswerSettings, service: Service) -> None:
    """The target's answers to conversations, from servers; with `target`, token ids are checked with its tokenizer."""
    decode = None if target is None else load_template(resolved(TargetConfig(where=target))).text
    asked, rows = asked_of(prompts)
    regenerate(asked, out, replace(service, key=api_key()), settings, decode, rows)


def capture(run: Run) -> None:
    """Features of both splits to disk, continuing where a stopped call ended."""
    require_engines(run)
    run.save_recipe()
    splits = {split: run.samples(split) for split in ("train", "held-out")}
    spec, shape = run.spec, run.target.shape
    tokens = sum(len(s) for found in splits.values() for s in found)
    needed = files.bytes_needed(spec, shape.hidden_size, tokens)
    say(
        f"capturing blocks {', '.join(map(str, spec.layers))} of {shape.layers} and the final state, {spec.dtype}: "
        f"{needed / max(tokens, 1):,.0f} bytes a token, {needed / 1e9:.2f} GB"
    )
    present = sum(files.bytes_present(run.feature_folder(split)) for split in splits)
    files.require_space(run.feature_folder("train"), needed - present)
    maker = run.capture()
    maker.check(splits["train"][0])
    with progress("capture", tokens, "tokens") as advance:
        for split, found in splits.items():
            files.write(run.feature_folder(split), run.identity(found), found, maker, advance)


def source(run: Run, split: str, maker: Capture | None) -> Source:
    """Features of a split: from files, or live through `maker`."""
    found = run.samples(split)
    if maker is None:
        return files.FileSource(run.feature_folder(split), run.identity(found))
    return LiveSource(maker, found)


def train(run: Run) -> checkpoint.TrainState:
    """Train the draft, or continue its training."""
    require_engines(run)
    recipe = run.recipe
    maker = None
    if recipe.features.kind == "live":
        maker = run.capture()
        maker.check(run.samples("train")[0])
    learning, held_out = source(run, "train", maker), source(run, "held-out", maker)
    about = facts(run, learning)
    checkpoint.require_same(run.folder, about)
    run.save_recipe()
    draft = run.new_draft()
    if recipe.draft.init_from is not None:
        say(f"starting from the draft of {recipe.draft.init_from}")
    elif not checkpoint.steps(run.folder):
        counts = vocab.count(run.samples("train", everything=True), run.target.shape.vocab_size)
        some = learning.batch(spread(range(len(learning)), INITIAL_SAMPLES))
        for name, value in draft.initialise(run.target, counts, some.to(run.device)).items():
            say(f"{name}: {value}")
    parameters = sum(p.numel() for p in draft.parameters())
    compute = dtype_of(recipe.train.dtype, run.device)
    say(f"{recipe.draft.kind} with {parameters / 1e6:.1f}M trained parameters, {len(learning):,} samples, computing in {compute}")
    return Trainer(run.folder, draft, run.target, learning, held_out, recipe.train, about, recipe.eval.width).fit()


def facts(run: Run, learning: Source) -> dict[str, Any]:
    """What a checkpoint is of, by setting; resuming under others is refused."""
    recipe = run.recipe.model_dump(mode="json")
    settings = {key: recipe["train"][key] for key in ("steps", "batch_tokens", "accumulate", "seed")}
    named = {f"train.{k}": v for k, v in settings.items()} | {f"train.optimizer.{k}": v for k, v in recipe["train"]["optimizer"].items()}
    named |= {f"draft.{k}": v for k, v in run.draft_config.model_dump(mode="json").items()}
    if run.recipe.draft.init_from is not None:
        named["draft.init_from (weights)"] = published(Path(run.recipe.draft.init_from)).digest
    digest = hashlib.sha256("".join(f"{learning.sample(i).id}:{n};" for i, n in enumerate(learning.lengths)).encode()).hexdigest()[:16]
    return {"target": run.target.fingerprint, "data (samples)": digest, **named}


def evaluation_prompts(run: Run) -> tuple[list[Prompt], Mapping[str, Any]]:
    """Prompts of the sets that the recipe names, else of its held-out conversations; and what became of every row."""
    settings, data = run.recipe.eval, run.recipe.data
    sets = open_sets(settings.sets, data) if settings.sets else [PromptSet(open_job(data, run.template, "held-out"))]
    longest = run.target.shape.max_positions - max(settings.max_new, settings.timed_tokens)
    return read_all(sets, run.template, settings.prompts, longest)


def decoders(run: Run, draft: Draft) -> tuple[Decoder, Decoder]:
    """Plain, and speculative with this draft."""
    settings = run.recipe.eval
    dtype = dtype_of(settings.dtype, run.device)
    plain = plain_decoder(run.chosen, run.device, dtype, run.template)
    return plain, replace(plain, draft=draft.to(dtype), width=settings.width)


def evaluate_run(run: Run) -> dict[str, Any]:
    """Decode prompts with the best checkpoint; leaves report.json, report.md and report.html."""
    draft, step = run.best_draft()
    trained = checkpoint.steps(run.folder)
    state = checkpoint.read_state(run.folder, trained[-1])[0] if trained else None
    prompts, sets = evaluation_prompts(run)
    report = evaluate(*decoders(run, draft), prompts, run.recipe.eval)
    report |= {
        "step": step,
        "simulated_acceptance_length": round(state.best_acceptance_length, 4) if state else None,
        "simulated_draft_tokens": state.drafted if state else None,
        "target": run.recipe.target.where,
        "draft": run.recipe.draft.kind,
        "sets": sets,
    }
    show.show(report)
    write_report(run, report)
    return report


def write_report(run: Run, report: dict[str, Any]) -> None:
    """report.json, report.md and report.html, each whole."""
    write_text(run.folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(run.folder / "report.md", show.markdown(report))
    write_text(run.folder / "report.html", page.html(report, run.template))


def require_engines(run: Run) -> None:
    """Refuse, before anything expensive, a draft that an engine of export.engines cannot serve. Raises ValueError with each reason."""
    wanted = run.recipe.export
    if wanted.engines:
        kind = DRAFTS[run.recipe.draft.kind]
        layouts.require(wanted.engines, layouts.refusals(kind, run.draft_config, run.target.shape, wanted.format))
