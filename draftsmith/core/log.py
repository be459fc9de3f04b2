"""What a person sees: one console, progress bars with rate and time left, plain tables, sections with their seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, soft_wrap=True)
"""Everything for people goes here."""
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class Interrupted(Exception):
    """Stopped by Ctrl-C or SIGTERM, with everything kept; the message says how to continue."""


class Advance(Protocol):
    """Moves a progress bar on by `amount`; `note` is shown at its end."""

    def __call__(self, amount: float, note: str = "") -> None: ...


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} {task.fields['unit']}/s" if task.speed else "")


@contextmanager
def progress(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A bar with rate, elapsed time and time left; without a total, what is known of these."""
    columns = (
        TextColumn("{task.description:<9}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"), _Rate(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=20) as bar:
        task = bar.add_task(title, total=total, unit=unit, note="")

        def advance(amount: float, note: str = "") -> None:
            bar.update(task, advance=amount, note=note)

        yield advance


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is left-aligned, the others right."""
    grid = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    console.print(grid)


def say(message: str) -> None:
    """A plain line."""
    console.print(message, markup=False)


def warn(message: str) -> None:
    """A setting is ignored, or a figure deserves a second look."""
    errors.print(f"warning: {message}", style="yellow", markup=False)


@contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Announce a stage and record how long it took."""
    console.rule(f"[bold]{name}", align="left")
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = round(time.perf_counter() - start, 2)
