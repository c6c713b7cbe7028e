"""The gaps of any Chrome trace, for the trace view."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.tracing.activity import WAIT, Measured, causes
from omni_lab.tracing.chrome_json import TraceError
from omni_lab.tracing.gaps import analyse, trace_files, workers_of
from omni_lab.tracing.intervals import intersection, nested
from omni_lab.tracing.steps import stage_marker
from omni_lab.tracing.trace_file import Events, Trace, read_trace
from omni_lab.views.around_gap import length
from omni_lab.views.trace_window import RANGES, trace_window

CANDIDATES = 4 * RANGES
"""Ranges of one window that are looked at, the longest; which lies in which is found among these."""


class TraceGaps:
    """The gaps of trace files, or of directories of them (of ours, the merged trace, which has all stages).

    Raises TraceError if no worker has gaps, with what is wrong with each; what `analyse` raises otherwise.
    """

    waiting = True

    def __init__(self, paths: Path | str | Iterable[Path | str], stage_regex: str | None = None) -> None:
        named = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
        merged = [(sorted(path.rglob("merged.json*")) if path.is_dir() else []) or [path] for path in named]
        self.files = trace_files([file for files in merged for file in files])
        self.markers = stage_marker(stage_regex)
        self.analysis = analyse(self.files, stage_regex)
        workers = self.analysis.workers
        if self.analysis.gaps.empty:
            told = "; ".join(f"{row.worker}: {row.reason}" for row in workers.itertuples())
            raise TraceError(f"{', '.join(map(str, self.files))}: no gaps between steps: {told}")
        known = set(self.analysis.gaps["worker"])
        self.first = {"worker": self.analysis.gaps.loc[self.analysis.gaps["gap_us"].idxmax(), "worker"]}
        self.choices: dict[str, list[tuple[str, Any]]] = {
            "worker": [(name, name) for name in workers["worker"] if name in known]
        }
        self._read = lru_cache(1)(read_trace)
        self.measured = lru_cache(1)(self._measured)

    def gaps(self, choice: Mapping[str, Any], waiting: bool) -> pd.DataFrame:
        """The gaps that were chosen, the longest first, with their `length_us`."""
        own = self.analysis.gaps[self.analysis.gaps["worker"] == choice["worker"]]
        lengths = own["gap_us"] if waiting else own["work_us"]
        return own.assign(length_us=lengths).sort_values("length_us", ascending=False, kind="stable")

    def subject(self, choice: Mapping[str, Any]) -> str:
        return f"gap of {choice['worker']}"

    def parts(self, gap: pd.Series, waiting: bool) -> list[tuple[str, float]]:
        """What the thread of the steps did in a gap, in µs, the longest first; without `waiting`, less its waits."""
        trace, measured = self.measured(gap["worker"])
        here = np.array([gap["start_ns"]]), np.array([gap["end_ns"]])
        found = causes(trace, replace(measured, idle=intersection(*measured.idle, *here)))
        return [(name, ns / 1e3) for name, kind, ns, _ in found if waiting or kind != "wait"]

    def explain(self, gap: pd.Series, waiting: bool) -> str:
        """Where the gap lies."""
        kind = f"{gap['kind']}, " if gap["kind"] else ""
        batch = f"batch {gap['batch']}" if gap["batch"] >= 0 else "batch not known"
        beside = "" if waiting or gap["gap_us"] == gap["work_us"] else f" of {length(gap['gap_us'])} with its waits"
        return f"The gap{beside} lies before step {gap['step']:,} ({kind}{batch})."

    def line(self, gap: pd.Series, waiting: bool) -> str:
        """A gap in a list."""
        return f"before step {gap['step']:,}" + (f", batch {gap['batch']}" if gap["batch"] >= 0 else "")

    def usual_ms(self, own: pd.DataFrame) -> float:
        """How much to show around a gap: some steps."""
        workers = self.analysis.workers.set_index("worker")
        return float(3 * workers["step_ms_median"][own["worker"].iloc[0]])

    def figure(self, gap: pd.Series, context_ms: float) -> go.Figure:
        trace, measured = self.measured(gap["worker"])
        low, high = int(gap["start_ns"] - 1e6 * context_ms), int(gap["end_ns"] + 1e6 * context_ms)
        return trace_window(window(trace, measured, low, high), gap, context_ms)

    def trace_file(self, choice: Mapping[str, Any]) -> Path:
        """The file that has the chosen worker."""
        workers = self.analysis.workers
        return Path(workers.loc[workers["worker"] == choice["worker"], "file"].iloc[0])

    def _measured(self, worker: str) -> tuple[Trace, Measured]:
        """The trace that has a worker, and what was measured of it."""
        workers = self.analysis.workers
        file = self.trace_file({"worker": worker})
        place = list(workers.loc[workers["file"] == str(file), "worker"]).index(worker)
        trace = self._read(file)
        return trace, list(workers_of(trace, self.markers))[place][1]


def window(trace: Trace, measured: Measured, low: int, high: int) -> pd.DataFrame:
    """The ranges of a trace between two times in ns, as `trace_window` takes them.

    The thread of the steps comes first, then the others of its process, the other threads, and the devices.
    """
    found = list(_ranges(trace, measured, low, high))
    steps = measured.steps.thread
    threads = sorted({thread for thread, *_ in found if thread >= 0}, key=lambda one: _rank(trace, one, steps))
    order = {thread: place for place, thread in enumerate(threads)}
    rows = []
    for thread, lane, kind, events in sorted(found, key=lambda one: order.get(one[0], len(order))):
        rows.append(
            pd.DataFrame(
                {
                    "lane": lane,
                    "thread": thread,
                    "name": [trace.names[name] for name in events.name],
                    "kind": kind,
                    "start_ns": events.start,
                    "end_ns": events.end,
                }
            )
        )
    columns = ["lane", "thread", "name", "kind", "start_ns", "end_ns", "depth"]
    if not rows:
        return pd.DataFrame(columns=columns)
    frame = pd.concat(rows, ignore_index=True)
    waits = (frame["kind"] != "device") & frame["name"].str.contains(WAIT.pattern, case=False, regex=True)
    frame["kind"] = frame["kind"].where(~waits, "wait")
    return frame.assign(depth=_depths(frame))


def _ranges(trace: Trace, measured: Measured, low: int, high: int) -> Iterator[tuple[int, str, str, Events]]:
    """Thread (-1: a device), name of its row, kind and ranges, of each row and kind."""
    tables = {"range": trace.ranges, "python": trace.python, "call": trace.calls, "device": trace.device}
    tables = {kind: table.take((table.end > low) & (table.start < high)) for kind, table in tables.items()}
    lengths = np.concatenate([table.end - table.start for table in tables.values()])
    least = np.partition(lengths, -CANDIDATES)[-CANDIDATES] if len(lengths) > CANDIDATES else 0
    marks = np.array(sorted(measured.steps.marks), np.int64)
    for kind, table in tables.items():
        table = table.take(table.end - table.start >= least)
        rows = table.device if kind == "device" else table.thread
        for row in np.unique(rows):
            events = table.take(rows == row)
            if kind == "device":
                pid, number = trace.devices[row]
                yield -1, f"device {pid if number is None else number}", kind, events
                continue
            pid, tid = trace.threads[row]
            lane = f"{trace.processes.get(pid, pid)}, thread {tid}"
            step = np.isin(events.name, marks) & (row == measured.steps.thread)
            for one, mask in (("step", step), (kind, ~step)):
                if mask.any():
                    yield int(row), lane, one, events.take(mask)


def _rank(trace: Trace, thread: int, steps: int) -> tuple[bool, bool, int]:
    return thread != steps, trace.threads[thread][0] != trace.threads[steps][0], thread


def _depths(frame: pd.DataFrame) -> np.ndarray:
    """In how many others of its row each range lies."""
    depth = np.zeros(len(frame), np.int64)
    for _, own in frame.groupby("lane", sort=False):
        own = own.assign(left=-own["end_ns"]).sort_values(["start_ns", "left"], kind="stable")
        around, _ = nested(own["start_ns"].to_numpy(), own["end_ns"].to_numpy())
        inner = np.zeros(len(own), np.int64)
        for place, parent in enumerate(around.tolist()):
            inner[place] = inner[parent] + 1 if parent >= 0 else 0
        depth[own.index] = inner
    return depth
