"""What an engine counts of its own speculation: at its metrics, and in its replies.

Field names and counting rules were read in the released sources of vLLM 0.32.0 and 0.33.0, SGLang 0.5.23 and llama.cpp (as vendored by llama-cpp-python
0.3.36); docs/bench.md states them. Everywhere acceptance length = 1 + accepted / drafts, the bonus token included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

VLLM, SGLANG, LLAMA = "vLLM", "SGLang", "llama-server"
RULES = {
    VLLM: "1 + accepted / drafts; a draft is a verification pass that had drafted tokens, and drafted tokens accepted behind the end of an answer count",
    SGLANG: "1 + correct drafts / verification passes, of our own requests; its own figure divides completion tokens by passes",
    LLAMA: "1 + accepted / verification passes that had drafted tokens",
    f"{LLAMA} (timings)": "1 + accepted / passes, where passes = predicted - 1 - accepted: passes without drafted tokens count too",
}
"""How each engine counts, in words that stand in every report."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')
_GENERATED = {VLLM: "vllm:generation_tokens_total", SGLANG: "sglang:generation_tokens_total", LLAMA: "llamacpp:tokens_predicted_total"}
_RUNNING = {VLLM: "vllm:num_requests_running", SGLANG: "sglang:num_running_reqs", LLAMA: "llamacpp:requests_processing"}
_PREFIX = {VLLM: "vllm:", SGLANG: "sglang:", LLAMA: "llamacpp:"}


@dataclass(frozen=True)
class Speculation:
    """Counts: verification passes with a draft, tokens drafted and accepted, accepted at each position (None where an engine does not say)."""

    drafts: int
    drafted: int | None
    accepted: int
    positions: tuple[int, ...] | None = None
    engine_length: float | None = None
    """The mean length by the engine's own rule where it is another one."""
    rule: str = VLLM

    def __add__(self, other: Speculation) -> Speculation:
        drafted = None if self.drafted is None or other.drafted is None else self.drafted + other.drafted
        drafts = self.drafts + other.drafts
        lengths = [(s.engine_length, s.drafts) for s in (self, other) if s.engine_length is not None]
        own = sum(length * n for length, n in lengths) / drafts if len(lengths) == 2 and drafts else None
        return Speculation(drafts, drafted, self.accepted + other.accepted, _sum(self.positions, other.positions, 1), own, self.rule)

    def since(self, before: Speculation) -> Speculation:
        """What was counted between two readings. Raises ValueError when a counter went back: the server was started again."""
        drafted = None if self.drafted is None or before.drafted is None else self.drafted - before.drafted
        found = Speculation(self.drafts - before.drafts, drafted, self.accepted - before.accepted, _sum(self.positions, before.positions, -1), None, self.rule)
        if min(found.drafts, found.drafted or 0, found.accepted) < 0:
            raise ValueError("the server's counters went back: it was started again in between")
        return found

    @property
    def length(self) -> float:
        """Mean acceptance length; 1 when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def position_rates(self) -> list[float] | None:
        """Accepted at each position / drafts, unconditional."""
        return None if self.positions is None or not self.drafts else [n / self.drafts for n in self.positions]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = self.position_rates
        return {
            "acceptance_length": round(self.length, 4), "drafts": self.drafts, "drafted": self.drafted, "accepted": self.accepted,
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "draft_tokens": len(self.positions) if self.positions is not None else None,
            "position_rates": None if rates is None else [round(r, 4) for r in rates],
            "engine_length": None if self.engine_length is None else round(self.engine_length, 4), "rule": RULES[self.rule],
        }  # fmt: skip


def _sum(a: Sequence[int] | None, b: Sequence[int] | None, sign: int) -> tuple[int, ...] | None:
    return None if a is None or b is None else tuple(x + sign * y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(frozen=True)
class Reading:
    """One look at a server. `speculation`: its counters, None where it has none; `generated`: completion tokens so far, of all clients; `running`: requests
    running now; `lifetime_length`: SGLang's mean acceptance length since its start."""

    engine: str | None = None
    version: str | None = None
    speculation: Speculation | None = None
    generated: int | None = None
    running: int | None = None
    lifetime_length: float | None = None


async def look(http: Any, url: str) -> Reading:
    """Read a server's counters; `url`: with /v1. A server that has none, or does not answer, gives an empty reading."""
    root = url.removesuffix("/v1")
    metrics = await _get(http, f"{root}/metrics")
    samples = parse(metrics) if isinstance(metrics, str) else []
    engine = next((e for e, prefix in _PREFIX.items() if any(name.startswith(prefix) for name, _, _ in samples)), None)
    info = await _get(http, f"{root}/server_info") if engine in (None, SGLANG) else None
    info = await _get(http, f"{root}/get_server_info") if info is None and engine in (None, SGLANG) else info
    if isinstance(info, Mapping) and isinstance(info.get("internal_states"), list):
        lengths = [s["avg_spec_accept_length"] for s in info["internal_states"] if isinstance(s, Mapping) and s.get("avg_spec_accept_length")]
        mean = sum(lengths) / len(lengths) if lengths else None
        return Reading(SGLANG, _word(info.get("version")), None, _total(samples, _GENERATED[SGLANG]), _total(samples, _RUNNING[SGLANG]), mean)
    if engine is None:
        props = await _get(http, f"{root}/props")
        known = isinstance(props, Mapping) and "default_generation_settings" in props
        return Reading(LLAMA, _word(props.get("build_info"))) if known and isinstance(props, Mapping) else Reading()
    version = await _get(http, f"{root}/version") if engine == VLLM else None
    number = _word(version.get("version")) if isinstance(version, Mapping) else None
    return Reading(engine, number, of_metrics(samples, engine), _total(samples, _GENERATED[engine]), _total(samples, _RUNNING[engine]))


def of_metrics(samples: Sequence[tuple[str, str, float]], engine: str) -> Speculation | None:
    """The counters of vLLM and of llama-server, which took over vLLM's names; None where there are none. Several engines behind one address add up."""
    name = f"{_PREFIX[engine]}spec_decode_num_"
    drafts, drafted, accepted = (_total(samples, f"{name}{what}_total") for what in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts is None or accepted is None:
        return None
    positions: dict[int, int] = {}
    for sample, labels, value in samples:
        if sample == f"{name}accepted_tokens_per_pos_total" and (place := _POSITION.search(labels)):
            positions[int(place[1])] = positions.get(int(place[1]), 0) + int(value)
    counts = tuple(positions.get(i, 0) for i in range(max(positions) + 1)) if positions else None
    return Speculation(drafts, drafted, accepted, counts, None, engine)


def of_reply(chunk: Mapping[str, Any]) -> Speculation | None:
    """What a reply says of its own request: SGLang's `sglext.spec_tokens_details`, llama-server's `timings`."""
    extension = chunk.get("sglext")
    details = extension.get("spec_tokens_details") if isinstance(extension, Mapping) else None
    if isinstance(details, Mapping) and details.get("spec_verify_ct"):
        histogram = details.get("spec_correct_drafts_histogram") or None
        proposed, passes = details.get("spec_num_proposed_drafts"), int(details["spec_verify_ct"])
        width = max(len(histogram) - 1 if histogram else 0, proposed // passes if proposed else 0)
        positions = tuple(sum(histogram[k:]) for k in range(1, width + 1)) if histogram else None
        return Speculation(passes, proposed, int(details["spec_num_correct_drafts"]), positions, details.get("spec_accept_length"), SGLANG)
    timings = chunk.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n"):
        accepted = int(timings["draft_n_accepted"])
        return Speculation(max(int(timings["predicted_n"]) - 1 - accepted, 0), int(timings["draft_n"]), accepted, None, None, f"{LLAMA} (timings)")
    return None


def parse(text: str) -> list[tuple[str, str, float]]:
    """Samples of a Prometheus text: name, labels as written, value."""
    found: list[tuple[str, str, float]] = []
    for line in text.split("\n"):
        if match := _SAMPLE.match(line):
            try:
                found.append((match[1], match[2] or "", float(match[3])))
            except ValueError:
                continue
    return found


def _total(samples: Sequence[tuple[str, str, float]], name: str) -> int | None:
    values = [value for sample, _, value in samples if sample == name]
    return int(sum(values)) if values else None


def _word(value: object) -> str | None:
    return None if value is None else str(value)


async def _get(http: Any, url: str) -> Any:
    """JSON, or text that is none; None for anything but a 200."""
    import httpx2

    try:
        response = await http.get(url, timeout=10.0)
    except httpx2.RequestError:
        return None
    if response.status_code != 200:
        return None
    try:
        return response.json()
    except ValueError:
        return response.text
