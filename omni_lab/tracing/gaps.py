"""Step gaps of any Chrome trace: where the time between two steps goes, or why a trace cannot tell."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from omni_lab.tracing.activity import Activity, Measured, activity_of, causes, measure, outside, work_ns
from omni_lab.tracing.chrome_json import TraceError
from omni_lab.tracing.owners import host_processes, owners
from omni_lab.tracing.repeats import between_profiler_steps, host_steps, repeated_steps, sequence
from omni_lab.tracing.steps import MARKERS, PROFILER_STEP, Marker, Steps, marked_steps, stage_marker
from omni_lab.tracing.trace_file import Events, Trace, read_trace

OK, INCOMPLETE = "ok", "incomplete"

WORKERS = (
    *("worker", "file", "status", "reason", "found", "steps", "window_ms", "step_ms_median", "gap_us_median"),
    *("gap_us_mean", "gap_us_p95", "gap_us_p99", "work_us_median", "gap_share", "busy_share", "idle_share"),
)
GAPS = ("worker", "step", "kind", "batch", "tokens", "start_ns", "end_ns", "gap_us", "work_us")
CAUSES = ("worker", "cause", "kind", "ms", "share", "ranges")
DEVICES = ("worker", "device", "busy_share", "idle_share")


@dataclass(slots=True)
class Analysis:
    """Frames with the columns WORKERS, GAPS, CAUSES and DEVICES.

    A gap is a row with the step that follows it; `work_us` is the gap without the time in which the step's thread
    waited. A worker that is incomplete has a reason, and no gaps, shares or causes: its figures are missing (NaN),
    never guessed.
    """

    workers: pd.DataFrame
    gaps: pd.DataFrame
    causes: pd.DataFrame
    devices: pd.DataFrame

    def by_batch(self) -> pd.DataFrame:
        """Gaps by worker and batch: how many, median, mean, p95 and p99 in µs. A batch of -1 is unknown."""
        grouped = self.gaps.groupby(["worker", "batch"])["gap_us"]
        columns = {"median": "median", "mean": "mean", "p95": lambda gaps: gaps.quantile(0.95)}
        columns["p99"] = lambda gaps: gaps.quantile(0.99)
        return grouped.agg(gaps="count", **columns).reset_index()


def analyse(
    paths: Path | str | Iterable[Path | str],
    stage_regex: str | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Analysis:
    """Analyses traces: files (.json, .json.gz) or directories of them. `stage_regex` matches names of ranges that mark
    steps; its groups number, kind, batch and tokens are read if it has them. `advance` is told of bytes read.

    Raises TraceError for what is no trace, re.error for what is no expression, and OSError.
    """
    markers = stage_marker(stage_regex)
    rows: dict[str, list[tuple]] = {"workers": [], "gaps": [], "causes": [], "devices": []}
    found: list[tuple[str, Path]] = []
    for path in trace_files(paths):
        trace = read_trace(path, advance)
        for name, measured, faults in workers_of(trace, markers):
            _add(rows, len(found), trace, measured, faults)
            found.append((name, path))
    names = _unique(found)
    columns = {"workers": WORKERS, "gaps": GAPS, "causes": CAUSES, "devices": DEVICES}
    frames = {key: pd.DataFrame(rows[key], columns=columns[key]) for key in columns}
    return Analysis(**{key: frame.assign(worker=frame["worker"].map(names)) for key, frame in frames.items()})


def _unique(found: list[tuple[str, Path]]) -> dict[int, str]:
    """A name of its own for each worker: all that share one are told apart by their files, from where these part."""
    files = [path.absolute() for _, path in found]
    above = os.path.commonpath([path.parent for path in files]) if files else ""
    often = Counter(name for name, _ in found)
    return {
        index: name if often[name] == 1 else f"{name} ({file.relative_to(above)})"
        for index, ((name, _), file) in enumerate(zip(found, files, strict=True))
    }


def trace_files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    """The trace files that paths name. Of a directory, those called *.trace.json, else merged.json, else all JSON.

    Each may be compressed (.gz). Raises TraceError for what does not exist, and for a directory without JSON.
    """
    found = []
    for path in map(Path, [paths] if isinstance(paths, Path | str) else paths):
        if path.is_dir():
            inside = sorted(one for end in ("*.json", "*.json.gz") for one in path.rglob(end) if one.is_file())
            called = [one for one in inside if ".trace.json" in one.name]
            merged = [one for one in inside if one.name.startswith("merged.json")]
            if not inside:
                raise TraceError(f"{path}: expected traces (*.json, *.json.gz) in the directory")
            found += called or merged or inside
        elif path.is_file():
            found.append(path)
        else:
            raise TraceError(f"{path}: expected a trace file or a directory of them, and there is none")
    return list({path.resolve(): path for path in found}.values())


def workers_of(trace: Trace, markers: tuple[Marker, ...]) -> Iterator[tuple[str, Measured | None, list[str]]]:
    """Name, figures and faults of each process that has steps."""
    faults = [trace.cut] if trace.cut else []
    if trace.damaged:
        faults.append(f"{trace.damaged} events are damaged, have no end, or end before they start")
    process = np.array([thread[0] for thread in trace.threads], object)
    owner, launch = owners(trace, process)
    marks = _marks(trace, markers)
    found: dict[int | str | None, tuple[Steps, bool]] = {}
    activities: dict[int | str | None, Activity] = {}
    processes = host_processes(trace, process)
    processes += [one for one in dict.fromkeys(owner.tolist()) if one not in processes]
    for pid in processes:
        calls = trace.calls.take((process == pid)[trace.calls.thread])
        mine = owner == pid
        activities[pid] = activity_of(trace, mine, launch[mine], calls)
        steps = marked_steps(marks.take((process == pid)[marks.thread]), trace.names, markers)
        if steps is not None:
            back_to_back = all(re.search(PROFILER_STEP, trace.names[mark]) for mark in steps.marks)
            if back_to_back and len(steps) and not len(activities[pid].events):
                steps = between_profiler_steps(steps, trace.ranges, trace.names)
            found[pid] = steps, False
    if not found and markers is MARKERS:
        for pid in processes:
            inferred = _inferred(trace, process == pid, activities[pid])
            if inferred is not None:
                found[pid] = inferred
    stem = re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", trace.path.name)
    if not found:
        lacking = "no marks of steps, and nothing repeats" if markers is MARKERS else "no range matches --stage-regex"
        yield stem, None, [*faults, f"no steps found: {lacking}"]
    titles = Counter(trace.processes.get(pid, "") for pid in found)
    for pid, (steps, of_device) in found.items():
        title = trace.processes.get(pid, "")
        named = bool(title) and "python" not in title.lower()
        name = title if named else stem
        if len(found) > 1 and not (named and titles[title] == 1):
            name = f"{name} {pid}"
        pauses = trace.pauses.take(trace.pauses.thread == steps.thread)
        measured = measure(steps, activities[pid], pauses, of_device)
        if len(steps) < 2:
            measured.faults.append("one step has no gap" if len(steps) else "no steps found")
        measured.faults += outside(trace, steps, activities[pid])
        yield name, measured, faults + measured.faults


def _marks(trace: Trace, markers: tuple[Marker, ...]) -> Events:
    """The ranges that a marker's expressions match."""
    patterns = [re.compile(text) for marker in markers for text in (marker.pattern, marker.parts) if text]
    named = np.array([any(pattern.search(name) for pattern in patterns) for name in trace.names], bool)
    return Events.join([part.take(named[part.name]) for part in (trace.ranges, trace.python, trace.calls)])


def _inferred(trace: Trace, in_process: np.ndarray, activity: Activity) -> tuple[Steps, bool] | None:
    """Steps of a process without marks, and whether their times are the device's."""
    if len(activity.events):
        steps = repeated_steps(activity.events.sorted(), trace.names, "device activity")
        if steps is not None:
            steps.thread = _launching_thread(trace, in_process, steps.thread)
            return steps, True
    host = trace.ranges.take(in_process[trace.ranges.thread])
    threads = [host.take(host.thread == thread) for thread in np.unique(host.thread)]
    if not threads:
        return None
    busiest = max(threads, key=lambda one: _length(sequence(one)))
    steps = host_steps(busiest, trace.names)
    return None if steps is None else (steps, False)


def _length(events: Events) -> int:
    return int((events.end - events.start).sum())


def _launching_thread(trace: Trace, in_process: np.ndarray, otherwise: int) -> int:
    """The thread of a process that calls the runtime most."""
    calls = trace.calls.thread[in_process[trace.calls.thread]]
    return int(np.bincount(calls).argmax()) if len(calls) else otherwise


def _add(rows: dict[str, list[tuple]], worker: int, trace: Trace, measured: Measured | None, faults: list[str]) -> None:
    reason = "; ".join(dict.fromkeys(faults))
    found = "" if measured is None else "; ".join([measured.steps.found, *measured.notes])
    steps = 0 if measured is None else len(measured.steps)
    step_ms = float(np.median(measured.finish - measured.begin) / 1e6) if steps and len(measured.begin) else np.nan
    head = (worker, str(trace.path), INCOMPLETE if faults else OK, reason, found, steps)
    if faults or measured is None:
        rows["workers"].append((*head, np.nan, step_ms, *[np.nan] * (len(WORKERS) - len(head) - 2)))
        return
    gap_us, one, window = measured.gap_ns / 1e3, measured.steps, measured.window_ns
    work_us = work_ns(trace, measured) / 1e3
    figures = (np.median(gap_us), gap_us.mean(), *np.percentile(gap_us, [95, 99]), np.median(work_us))
    shares = (measured.gap_ns.sum() / window, measured.busy_share, 1 - measured.busy_share)
    rows["workers"].append((*head, window / 1e6, step_ms, *map(float, figures), *map(float, shares)))
    number = np.where(one.number >= 0, one.number, np.arange(len(one)))
    for row, gap, work, low, high in zip(
        measured.step.tolist(), gap_us, work_us, measured.low, measured.high, strict=True
    ):
        which = (int(number[row]), one.kind[row], int(one.batch[row]), int(one.tokens[row]))
        rows["gaps"].append((worker, *which, int(low), int(high), float(gap), float(work)))
    total = max(int(measured.gap_ns.sum()), 1)
    for cause, kind, ns, count in causes(trace, measured):
        rows["causes"].append((worker, cause, kind, ns / 1e6, ns / total, count))
    for device, share in measured.device_shares.items():
        row, number_of = trace.devices[device]
        rows["devices"].append((worker, str(row if number_of is None else number_of), share, 1 - share))
