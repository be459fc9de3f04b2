"""The command line: each command loads a recipe and calls one function."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from draftsmith.core.config import load
from draftsmith.core.log import Interrupted, errors

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="Train, check and ship draft models for speculative decoding.\n\n"
    "Start with `draftsmith quickstart`; look at a target with `draftsmith inspect`. "
    "The same stages one by one, with a recipe: `prepare`, `capture`, `train`, `eval`, `export`.\n\n"
    "`draftsmith regenerate` records a target's own answers to any conversations; `draftsmith bench` measures a running server.",
)  # fmt: skip

RecipePath = Annotated[Path, typer.Argument(help="YAML recipe, for example recipes/smollm2-eagle3.yaml", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that replace the recipe's: key.sub=value …", show_default=False)]


@app.callback()
def _before_every_command() -> None:
    from draftsmith.core.env import keep_freed_memory

    keep_freed_memory()


def _run(recipe: Path, overrides: list[str] | None) -> Any:
    from draftsmith.pipeline import Run
    from draftsmith.recipe import Recipe

    return Run(load(Recipe, recipe, overrides or []))


@app.command()
def quickstart(
    target: Annotated[str, typer.Option(help="smollm2 (a real 135M-parameter chat model), or the directory of any other target.")] = "smollm2",
    minutes: Annotated[float, typer.Option(min=2, help="Time budget; conversations and steps are fitted to it.")] = 10,
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/quickstart"),
) -> None:
    """Everything once: features, training, lossless decoding, export, for a real target. Leaves report.json and export/."""
    from draftsmith.quickstart import quickstart as start

    start(target, minutes, str(run))


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="smollm2, a checkpoint directory, a .gguf file, or a hub id.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)] = None,
    head_from: Annotated[str | None, typer.Option(help="Unquantized checkpoint whose embedding, norm and head are used.", show_default=False)] = None,
    embedding_key: Annotated[str | None, typer.Option(help="Overrules which tensor is the embedding.", show_default=False)] = None,
    head_key: Annotated[str | None, typer.Option(help="Overrules which tensor is the head.", show_default=False)] = None,
    norm_key: Annotated[str | None, typer.Option(help="Overrules which tensor is the final norm.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What a target is: where its embedding, norm and head lie and why, its logit rule, what it costs to capture, and what could go wrong.

    Reads three tensors, not the model. Tensors that cannot be used end in exit code 2, below all that was found without them.

    Example: draftsmith inspect Qwen/Qwen2.5-0.5B --json
    """
    from draftsmith import inspect as inspection
    from draftsmith.pipeline import resolved
    from draftsmith.target.config import TargetConfig

    chosen = TargetConfig(where=target, revision=revision, head_from=head_from, embedding_key=embedding_key, head_key=head_key, norm_key=norm_key)
    found = inspection.inspect(resolved(chosen))
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        inspection.show(found)
    if found["problem"] is not None:
        raise ValueError(found["problem"])


@app.command()
def regenerate(
    prompts: Annotated[str, typer.Argument(help="File, hub data set or public set of conversations; their answers are replaced.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="File to write, .jsonl or .jsonl.gz, in the order of the input.", show_default=False)],
    server: Annotated[list[str] | None, typer.Option(help="Address of a server of the target, as http://host:8000; repeat it for several.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Answer on this machine instead, in float32.")] = False,
    target: Annotated[str | None, typer.Option(help="smollm2 or a directory: what answers locally (default smollm2); checks a server's token ids.")] = None,
    model: Annotated[str | None, typer.Option(help="Name that the servers serve; found out when absent.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Each turn derives its own from it.")] = 0,
    reasoning: Annotated[str, typer.Option(help="keep, or off: ask the template not to think.")] = "keep",
    template_kwargs: Annotated[str, typer.Option(help="JSON object that the chat template is given.")] = "{}",
    token_ids: Annotated[str, typer.Option(help="field, logprobs or off: where token ids of an answer are asked for.")] = "field",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests running on each server.")] = 32,
    tries: Annotated[int, typer.Option(min=1, help="Tries of a request before its conversation counts as failed.")] = 6,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a reply may take.")] = 600.0,
    patience: Annotated[float, typer.Option(min=0, help="Seconds without any working server before giving up.")] = 120.0,
    batch: Annotated[int, typer.Option(min=1, help="Conversations decoded together, locally.")] = 64,
) -> None:
    """Ask the target for its own answers, turn by turn: what a draft should learn from. Stopped or killed, the same command continues.

    Example: draftsmith regenerate prompts.jsonl answers.jsonl --server http://a:8000 --server http://b:8000 --temperature 0.7
    """
    from draftsmith import pipeline
    from draftsmith.data.chat import AnswerSettings
    from draftsmith.data.regenerate import Service

    settings = AnswerSettings(max_tokens, temperature, top_p, seed, reasoning, token_ids, _object(template_kwargs, "--template-kwargs"))
    if local == bool(server):
        raise ValueError("who is to answer? Give --server ADDRESS (once or several times), or --local")
    if local:
        pipeline.answer_locally(prompts, out, target or "smollm2", settings, batch)
    else:
        service = Service(tuple(server or ()), model, None, concurrency, tries, timeout, patience)
        pipeline.answer_by_servers(prompts, out, target, settings, service)


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{option} {text!r}: expected a JSON object, for example '{{\"enable_thinking\": true}}'")
    return found


@app.command()
def prepare(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="One recipe; or files, hub data sets, public sets by name. And settings: data.max_length=4096 …", show_default=False),
    ] = None,
    target: Annotated[str | None, typer.Option(help="smollm2, or a directory; the recipe's when absent.", show_default=False)] = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many samples, what is learned from in colour.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that would be dropped.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes that render and tokenize.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Also write token ids and masks, .jsonl or .parquet.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page to browse the samples in: one file, no network.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files that --out and --html name.")] = False,
    presets: Annotated[bool, typer.Option("--presets", help="List the public sets that can be read by name.")] = False,
) -> None:
    """Turn conversations into samples and count everything: shapes, drops with reasons, lengths, supervised share, coverage of draft vocabularies.

    Example: draftsmith prepare my-talks.jsonl ultrachat --target /models/Qwen3-8B --show 3 data.too_long=turn
    """
    from draftsmith import prepare as preparing

    if presets:
        preparing.list_presets()
    else:
        preparing.prepare(inputs or [], target, show, strict, processes, out, html, force)


@app.command()
def capture(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Run the target over all conversations and write its features to disk. Stopped, it continues where it was."""
    from draftsmith import pipeline

    pipeline.capture(_run(recipe, overrides))


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train the draft. Stopped or killed, the same command continues from the last checkpoint to the same bits.

    Example: draftsmith train recipes/smollm2-eagle3.yaml train.steps=200 draft.steps=3 features.kind=live
    """
    from draftsmith import pipeline

    pipeline.train(_run(recipe, overrides))


@app.command("eval")
def evaluate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Decode held-out prompts with and without the best checkpoint: acceptance, speed, identity. Leaves report.json."""
    from draftsmith import pipeline

    pipeline.evaluate_run(_run(recipe, overrides))


@app.command()
def export(
    recipe: RecipePath,
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; <run>/export when absent.")] = None,
) -> None:
    """Write the best checkpoint as serving engines load it; read back and compared before success is reported."""
    from draftsmith import shipping

    shipping.export_run(_run(recipe, overrides), to)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Exported directory.", show_default=False)],
    target: Annotated[str | None, typer.Option(help="smollm2, a directory or a hub id: what it must be a draft of.", show_default=False)] = None,
    run: Annotated[Path | None, typer.Option(help="Recipe of the run whose checkpoint it must equal.", show_default=False)] = None,
    engine: Annotated[list[str] | None, typer.Option(help="sglang, vllm, llama.cpp or tensorrt-llm: must be able to serve it; repeat it.")] = None,
    environment: Annotated[Path | None, typer.Option(help="Environment with installed engines, to look up what they read.", show_default=False)] = None,
) -> None:
    """Check every rule that engines have for a draft's directory; with --run, also that it drafts what the checkpoint drafts.

    Prints a table of checks and ends in exit code 2 when one fails.

    Example: draftsmith verify runs/quickstart/export --target smollm2 --run runs/quickstart/run.yaml
    """
    from draftsmith import shipping

    if not shipping.verify_directory(folder, target, None if run is None else _run(run, None), tuple(engine or ()), environment):
        raise typer.Exit(2)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="Directory of a draft published by SpecForge, EAGLE, speculators or Draftsmith.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Folder to write.", show_default=False)],
    target: Annotated[str, typer.Option(help="smollm2, a directory or a hub id: the target that it drafts for.", show_default=False)],
) -> None:
    """Turn a published draft into a directory as `export` writes it, to serve it, evaluate it or train from it (draft.init_from).

    Example: draftsmith import downloads/some-eagle3 --target /models/Llama-3.1-8B-Instruct --to drafts/some-eagle3
    """
    from draftsmith import shipping

    shipping.import_draft(folder, to, target)


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="Address of the server to measure, as http://host:8000.", show_default=False)],
    baseline: Annotated[str | None, typer.Option(help="The same target served without speculation, to compare with.", show_default=False)] = None,
    prompts: Annotated[str, typer.Option(help="File, hub data set or public set; `held-out` are the bundled held-out prompts.")] = "held-out",
    number: Annotated[int | None, typer.Option(min=1, help="This many prompts, evenly spread; all when absent.", show_default=False)] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Requests at a time; repeat it for several levels. 1 when absent.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second, at random times; repeat it for several levels.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, and outputs are compared.")] = 0.0,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests to each server that do not count.")] = 4,
    model: Annotated[str | None, typer.Option(help="Name that the server serves; found out when absent.")] = None,
    baseline_model: Annotated[str | None, typer.Option(help="The same of the baseline.")] = None,
    seed: Annotated[int, typer.Option(help="For times of arrival, sampling and confidence intervals.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a server may be silent.")] = 120.0,
    report: Annotated[Path | None, typer.Option(help="report.json of a run: three acceptance lengths side by side.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures: one file, no network.", show_default=False)] = None,
) -> None:
    """Measure a running server: latencies, tokens/s, errors, and acceptance by its own counters (vLLM, SGLang, llama-server).

    Example: draftsmith bench --url http://a:8000 --baseline http://b:8000 --concurrency 1 --concurrency 8 --report runs/quickstart/report.json
    """
    from draftsmith.bench import command
    from draftsmith.bench.run import BenchSettings, levels
    from draftsmith.core.env import api_key
    from draftsmith.core.log import say

    asked = None
    if prompts != "held-out":
        from draftsmith.pipeline import asked_of

        asked, rows = asked_of(prompts)
        say(f"{prompts}: {rows.describe()}")
    settings = BenchSettings(
        url, levels(concurrency, rate), baseline, model, baseline_model, max_tokens, temperature, warm_up, seed, timeout, api_key()
    )  # fmt: skip
    command.bench(asked, prompts, number, settings, command.Outputs(report, out, html))


def main() -> None:
    """Entry point: mistakes of the user end in one message and exit code 2, a stop by Ctrl-C in 130."""
    try:
        code = app(standalone_mode=False)
    except Interrupted as stopped:
        _fail(str(stopped), _STOPPED)
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    except (ValueError, OSError) as error:
        _fail(f"error: {error}", 2)
    except Exception as error:
        show = getattr(error, "show", None)  # usage errors of the command line show themselves
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))
    if code == _STOPPED:  # Typer turns Ctrl-C into this code
        _fail("stopped; whatever was finished is kept, and the same command continues", _STOPPED)
    sys.exit(code if isinstance(code, int) else 0)


_STOPPED = 130


def _fail(message: str, code: int) -> NoReturn:
    errors.print(message, markup=False)
    sys.exit(code)
