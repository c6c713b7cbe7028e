"""Steps of a loop that nothing marks: by what repeats in its ranges, or in what its devices do."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from omni_lab.tracing.intervals import top_level
from omni_lab.tracing.steps import Steps
from omni_lab.tracing.trace_file import Events

FEWEST = 3
"""Repetitions without which nothing is taken for a loop."""
MOST = 0.8
"""The share of turns that must be alike: a first one, that reads a prompt, is not."""
ALONE = 8
"""Occurrences without which no name is taken for a loop's against others that are more frequent."""
STANDING_OUT = 5
"""Pauses without which nothing is: a few long ones come at regular distances by chance."""
NAMES_SHOWN, NAME_LENGTH = 4, 60
"""How much of a turn is shown: kernels have names of hundreds of letters."""
PAUSE = 1000
"""A gap longer than all else together, and than this many steps, is no gap of a loop."""


def host_steps(ranges: Events, names: list[str]) -> Steps | None:
    """Steps by what repeats in the outermost ranges of one thread, where names that differ in digits only are alike.

    As they are, such names may be layers, which are no steps, or numbered steps of a program that is itself repeated:
    if both readings find a loop, but not the same, that is a fault.
    """
    outermost, title = sequence(ranges), "the host's outermost ranges"
    labels = [re.sub(r"\d+", "#", name) for name in names]
    first = {label: index for index, label in reversed(list(enumerate(labels)))}
    alike = np.array([first[label] for label in labels], np.int64)
    steps = repeated_steps(replace(outermost, name=alike[outermost.name]), labels, title)
    exact = repeated_steps(outermost, names, title)
    if steps is None or exact is None:
        return steps or exact
    if max(len(steps), len(exact)) >= 2 * min(len(steps), len(exact)):
        steps.faults.append(
            f"steps are ambiguous: {len(steps)} if names that differ in digits only are alike, else {len(exact)}: "
            "use --stage-regex"
        )
    return steps


def between_profiler_steps(marked: Steps, ranges: Events, names: list[str]) -> Steps:
    """The steps of a loop without devices that ProfilerStep marks: what repeats once in each, by its thread's ranges.

    ProfilerStep lasts from one call of `step()` to the next, so by itself it shows no gap. It is a fault if the ranges
    inside do not tell of one.
    """
    inside = (ranges.thread == marked.thread) & (ranges.start >= marked.start[0]) & (ranges.end <= marked.end[-1])
    steps = host_steps(ranges.take(inside & ~np.isin(ranges.name, list(marked.marks))), names)
    turn = np.zeros(0, int) if steps is None else np.searchsorted(marked.start, steps.start, side="right") - 1
    if steps is None or len(turn) < len(marked) - 1 or (np.diff(turn) != 1).any():
        reason = "ProfilerStep lasts from one step to the next; without device activity it shows no gap"
        return replace(marked, faults=[*marked.faults, f"{reason}: use --stage-regex"])
    found = f"{marked.found}, one turn each; {steps.found}"
    return replace(steps, number=marked.number[turn], found=found, faults=marked.faults + steps.faults)


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
        counts = f"{what} begins {len(named)}, and pauses that stand out {len(paused)}"
        faults = [f"steps are ambiguous: {counts}: use --stage-regex"]
    last = np.append(first[1:], min(len(events), int(first[-1] + np.median(np.diff(first))))) - 1
    absent = np.full(len(first), -1, np.int64)
    start, end = events.start[first], np.maximum(reach[last], events.end[first])
    faults += pauses_of_loop(pause, end - start, int(reach[-1] - events.start[0]))
    return Steps(
        start=start,
        end=end,
        number=absent,
        batch=absent,
        tokens=absent,
        kind=[""] * len(first),
        thread=int(events.thread[first[0]]),
        found=f"inferred from {title}: {what} begins each of {len(first)} repetitions{_turn(events, first, names)}",
        faults=faults,
    )


def pauses_of_loop(pause_ns: np.ndarray, step_ns: np.ndarray, window_ns: int) -> list[str]:
    """The fault of a pause that is none of the loop's, in a list, if there is one."""
    longest = int(pause_ns.max(initial=0))
    if longest > PAUSE * np.median(step_ns) and longest > window_ns - longest:
        return [f"a pause of {longest / 1e9:.3g} s is longer than all else: the clock jumped, or the loop was paused"]
    return []


def _turn(events: Events, first: np.ndarray, names: list[str]) -> str:
    """What a turn is made of, for people to judge: that one in the middle, as the first is often a longer one."""
    middle = (len(first) - 1) // 2
    found = list(dict.fromkeys(events.name[first[middle] : first[middle + 1]].tolist()))
    shown = ", ".join(repr(names[name][:NAME_LENGTH]) for name in found[:NAMES_SHOWN])
    more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
    return f" of {shown}{more}; if that is no step, give the names of steps with --stage-regex"


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
