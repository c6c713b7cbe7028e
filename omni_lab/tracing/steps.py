"""Finding the steps of a loop in a trace: by ranges that mark them, or by what repeats."""

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
    Marker("torch.profiler", r"^ProfilerStep#?\s?\*?(?P<number>\d+)"),
)
"""The first that occurs in a process is used. vLLM 0.30 writes execute_..., and its scopes if
VLLM_CUSTOM_SCOPES_FOR_PROFILING is set; ProfilerStep comes last, for it also spans what lies between steps."""

FEWEST = 3
"""Repetitions without which nothing is taken for a loop."""
MOST = 0.8
"""The share of turns that must be alike: a first one, that reads a prompt, is not."""
ALONE = 8
"""Occurrences without which no name is taken for a loop's against others that are more frequent."""
STANDING_OUT = 5
"""Pauses without which nothing is: a few long ones come at regular distances by chance."""


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
        parts = [int(value) for name, value in groups.items() if name.rstrip("0123456789") == key and value]
        return sum(parts) if parts else -1

    return {
        "number": total("number"),
        "batch": total("batch"),
        "tokens": total("tokens"),
        "kind": groups.get("kind") or "",
    }


def repeated_steps(events: Events, names: list[str], title: str) -> Steps | None:
    """Steps by what repeats in a sequence of events (ranges of one thread that are in no other, or device activity).

    What happens exactly once in each step happens about as often as the coarsest loop turns: of the names that are
    spread evenly over the sequence, those with the fewest occurrences. A step begins with that one of them which has
    the longest pause before it. Where names tell nothing, pauses that stand out do. If they tell of fewer steps than
    names do, either may be right, which is a fault. None if nothing repeats, for instance if steps differ too much.
    """
    if len(events) < FEWEST:
        return None
    reach = np.maximum.accumulate(events.end)
    pause = np.concatenate([[0], np.maximum(events.start[1:] - reach[:-1], 0)])
    named, paused = _turns_by_name(events, pause), _turns_by_pause(pause)
    if named is None and paused is None:
        return None
    first = paused if named is None else named
    what = "a pause" if named is None else repr(names[int(events.name[first[0]])])
    faults = []
    if named is not None and paused is not None and 2 * len(paused) <= len(named):
        faults = [f"steps are ambiguous: {what} begins {len(named)}, and pauses that stand out {len(paused)}"]
    last = np.append(first[1:], min(len(events), int(first[-1] + np.median(np.diff(first))))) - 1
    absent = np.full(len(first), -1, np.int64)
    return Steps(
        start=events.start[first],
        end=np.maximum(reach[last], events.end[first]),
        number=absent,
        batch=absent,
        tokens=absent,
        kind=[""] * len(first),
        thread=int(events.thread[first[0]]),
        found=f"inferred from {title}: {what} begins each of {len(first)} repetitions",
        faults=faults,
    )


def _turns_by_name(events: Events, pause: np.ndarray) -> np.ndarray | None:
    """The rows of the name that begins each turn of the loop, if most names occur equally often in most turns."""
    counts = np.bincount(events.name)
    order = np.argsort(events.name, kind="stable")
    edges = np.concatenate([[0], np.cumsum(counts)])
    frequent = np.flatnonzero(counts >= FEWEST).tolist()
    occurrences = [order[edges[name] : edges[name + 1]] for name in frequent]
    even = [rows for rows in occurrences if _even(rows, len(events), 2.0)]
    group = _coarsest(even)
    # the pause before the first occurrence belongs to no turn
    first = max(group, key=lambda rows: (np.median(pause[rows[1:]]), len(rows)), default=None)
    if first is None:
        return None
    steady = []
    for rows in (rows for rows in occurrences if rows is not first):
        turns = np.searchsorted(first, rows, side="right") - 1
        times = np.bincount(turns[(turns >= 0) & (turns < len(first) - 1)], minlength=len(first) - 1)
        if usual := np.median(times):
            steady.append((times == usual).mean() >= MOST)
    return first if not steady or np.mean(steady) >= 0.5 else None


def _coarsest(even: list[np.ndarray]) -> list[np.ndarray]:
    """The names with the fewest occurrences, but for a name alone that by chance came evenly a few times."""
    sizes = sorted(set(map(len, even)))
    groups = [[rows for rows in even if 0 <= len(rows) - size <= 1] for size in sizes]
    return next((group for group in groups if len(group) > 1 or len(group[0]) >= ALONE), groups[0] if groups else [])


def _turns_by_pause(pause: np.ndarray) -> np.ndarray | None:
    """The rows behind pauses that are at least three times as long as all others, and come at regular distances."""
    order = np.argsort(-pause)
    longest = pause[order].astype(float)
    most = len(pause) // 2
    if most <= STANDING_OUT:
        return None
    drop = longest[STANDING_OUT - 1 : most] / np.maximum(longest[STANDING_OUT : most + 1], 1)
    count = int(drop.argmax())
    rows = np.append(0, np.sort(order[: STANDING_OUT + count]))
    return rows if drop[count] >= 3 and _even(rows, len(pause), 1.1) else None


def _even(rows: np.ndarray, total: int, within: float) -> bool:
    """Whether occurrences are those of a loop: all over the sequence, and most turns alike in length, within a factor.

    Length is counted in events, not in time: the first turns of a program often take a hundred times as long.
    """
    lengths = np.diff(rows)
    typical = np.median(lengths)
    alike = (lengths >= typical / within) & (lengths <= typical * within)
    return bool(rows[-1] - rows[0] + typical >= 0.5 * total and alike.mean() >= MOST)


def sequence(events: Events) -> Events:
    """What a thread did one after the other: its outermost ranges, without those that have the loop itself inside."""
    events = events.sorted()
    inside = np.searchsorted(events.start, events.end, side="left") - np.arange(len(events))
    events = events.take(inside <= max(len(events) / FEWEST, 1))
    return events.take(top_level(events.start, events.end))
