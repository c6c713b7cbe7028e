"""The steps of a loop in a trace, and finding them by ranges that mark them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from omni_lab.tracing.intervals import top_level
from omni_lab.tracing.trace_file import Events


@dataclass(frozen=True, slots=True)
class Marker:
    """A kind of range that marks steps. Groups of `pattern` called number, kind, batch and tokens are read if it has
    them; `batch` and `tokens` are summed over groups batch1, batch2 and so on. Ranges matching `parts` that follow a
    mark belong to its step, though they lie outside of it.
    """

    title: str
    pattern: str
    parts: str | None = None


MODEL_RUNNER = r"^gpu_model_runner: (?:preprocess|forward|postprocess|sample|draft|bookkeep)"

PROFILER_STEP = r"^ProfilerStep#?\s?\*?(?P<number>\d+)"

MARKERS = (
    Marker("omni_lab", r"^step (?P<number>\d+) (?P<kind>\S+) batch=(?P<batch>\d+) tokens=(?P<tokens>\d+)"),
    Marker(
        "vLLM",
        r"^execute_(?:\d+_)?context_(?P<batch1>\d+)\((?:sq)?(?P<tokens1>\d+)[^)]*\)"
        r"_generation_(?P<batch2>\d+)\((?:sq)?(?P<tokens2>\d+)",
        MODEL_RUNNER,
    ),
    Marker("SGLang", r"^step\[(?P<kind>\w+) bs=(?P<batch>\d+)(?: toks=(?P<tokens>\d+))?"),
    Marker("vLLM's scopes", r"^gpu_model_runner: preprocess$", MODEL_RUNNER),
    Marker("torch.profiler", PROFILER_STEP),
)
"""The first that occurs in a process is used. vLLM 0.30 writes execute_..., and its scopes if
VLLM_CUSTOM_SCOPES_FOR_PROFILING is set; ProfilerStep comes last, for it also spans what lies between steps."""

MOST_DIGITS = 18
"""Of a number in the name of a step; what is none, or does not fit into 64 bits, is not known."""


@dataclass(slots=True)
class Steps:
    """The steps of one thread, in the order of time, in ns. Where a step says nothing, number and batch are -1.

    `found` says how; `faults` what makes them doubtful; `marks` are the names of the ranges that mark them.
    """

    start: np.ndarray
    end: np.ndarray
    number: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    kind: list[str]
    thread: int
    found: str
    faults: list[str]
    marks: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.start)


def stage_marker(stage_regex: str | None) -> tuple[Marker, ...]:
    """The markers to look for: the known ones, or what a user gave. Raises re.error if that is no expression."""
    if stage_regex is None:
        return MARKERS
    re.compile(stage_regex)
    return (Marker(f"--stage-regex {stage_regex}", stage_regex),)


def marked_steps(events: Events, names: list[str], markers: tuple[Marker, ...]) -> Steps | None:
    """Steps by the first of the markers that one of a process's host ranges matches; None if there is none."""
    present = np.unique(events.name)
    for marker in markers:
        pattern = re.compile(marker.pattern)
        matches = {name: found for name in present.tolist() if (found := pattern.search(names[name]))}
        if matches:
            return _marked(events, names, marker, matches, present)
    return None


def _marked(
    events: Events, names: list[str], marker: Marker, matches: dict[int, re.Match[str]], present: np.ndarray
) -> Steps:
    marks = events.take(np.isin(events.name, list(matches)))
    counts = np.bincount(marks.thread)
    thread = int(counts.argmax())
    found = f"markers: {names[int(marks.name[0])]!r} ({marker.title})"
    if left_out := len(marks) - int(counts.max()):
        found += f", {left_out} in other threads left out"
    marks = marks.take(marks.thread == thread)
    faults = _order_faults(marks)
    marks = marks.sorted()
    marks = marks.take(top_level(marks.start, marks.end))
    values = [_values(matches[name]) for name in marks.name.tolist()]
    worked = np.array([value["batch"] != 0 for value in values])  # a step of nobody does nothing
    marks, values = marks.take(worked), [value for value in values if value["batch"] != 0]
    end = marks.end.copy()
    if marker.parts:
        pattern = re.compile(marker.parts)
        parts = [name for name in present.tolist() if pattern.search(names[name])]
        rows = np.isin(events.name, parts) & (events.thread == thread)
        step = np.searchsorted(marks.start, events.start[rows], side="right") - 1
        np.maximum.at(end, step[step >= 0], events.end[rows][step >= 0])
        end = np.minimum(end, np.append(marks.start[1:], np.iinfo(np.int64).max))
    number = np.array([value["number"] for value in values], np.int64)
    return Steps(
        start=marks.start,
        end=end,
        number=number,
        batch=np.array([value["batch"] for value in values], np.int64),
        tokens=np.array([value["tokens"] for value in values], np.int64),
        kind=[value["kind"] for value in values],
        thread=thread,
        found=found,
        faults=faults + (_number_faults(number) if worked.all() else []),
        marks=frozenset(matches),
    )


def _order_faults(written: Events) -> list[str]:
    """Writers keep to the order in which a thread's ranges start, or end."""
    backwards = (np.diff(written.start) < 0).any() and (np.diff(written.end) < 0).any()
    return ["the marks of steps run backwards: the clock jumped"] if backwards else []


def _number_faults(number: np.ndarray) -> list[str]:
    """Numbers that are missing between the first and the last step, or that come back."""
    if (number < 0).any() or len(number) < 2:
        return []
    if (np.diff(number) <= 0).any():
        return ["step numbers run backwards: the clock jumped, or several loops write steps in one thread"]
    missing = int(number[-1] - number[0]) + 1 - len(number)
    return [f"{missing} of {missing + len(number)} steps are missing"] if missing else []


def _values(match: re.Match[str]) -> dict[str, int | str]:
    groups = match.groupdict()

    def total(key: str) -> int:
        texts = [value for name, value in groups.items() if name.rstrip("0123456789") == key and value]
        parts = [int(text) for text in texts if text.isdecimal() and len(text) <= MOST_DIGITS]
        return sum(parts) if parts else -1

    return {
        "number": total("number"),
        "batch": total("batch"),
        "tokens": total("tokens"),
        "kind": groups.get("kind") or "",
    }
