"""Any Chrome trace as compact columns, with the categories that Kineto, PyTorch's profiler, writes.

https://github.com/pytorch/kineto
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from omni_lab.tracing.chrome_json import Event, EventStream

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "mtia_runtime", "Runtime"})
PYTHON = frozenset({"python_function"})
IGNORED = frozenset({"gpu_user_annotation", "overhead", "cuda_profiler_range", "cuda_sync"})
"""Not what a thread does: copies of host ranges on the device's rows, and the profiler's own."""


LATEST_US = 9e15
"""Times that 64 bits of ns hold, 285 years."""


@dataclass(frozen=True, slots=True)
class Events:
    """Ranges as columns, one row a range, in the order of the file. Times in ns of the trace's clock.

    `name` and `thread` index the trace's `names` and `threads`. `correlation` ties a call of the runtime to what it
    started on a device (-1: none). `device` indexes the trace's `devices`; only device activity has it.
    """

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray
    device: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: np.ndarray) -> Events:
        """The rows of an index or a mask."""
        return Events(*(getattr(self, column)[rows] for column in self.__slots__))

    def sorted(self) -> Events:
        """By start; of ranges that start together the longest first, so that a parent precedes its children."""
        return self.take(np.lexsort((-self.end, self.start)))

    @staticmethod
    def join(parts: list[Events]) -> Events:
        return Events(*(np.concatenate([getattr(part, column) for part in parts]) for column in Events.__slots__))


@dataclass(slots=True)
class Trace:
    """One file. `ranges`: host ranges but for Python's and the runtime's, which are `python` and `calls`.

    `pauses`: in which a capture of ours wrote what it had recorded, and the worker stood still for it.
    `cut`: why the file ends early, else None. `damaged`: events that are no events, without an end or with a negative
    duration. `recorded`: the profiler's own window in ns, if the file has it.
    """

    path: Path
    names: list[str] = field(default_factory=list)
    threads: list[tuple[int | str | None, int | str | None]] = field(default_factory=list)
    devices: list[tuple[int | str | None, int | str | None]] = field(default_factory=list)
    processes: dict[int | str | None, str] = field(default_factory=dict)
    ranges: Events = field(init=False)
    python: Events = field(init=False)
    calls: Events = field(init=False)
    device: Events = field(init=False)
    pauses: Events = field(init=False)
    cut: str | None = None
    damaged: int = 0
    recorded: tuple[int, int] | None = None


def read_trace(path: Path, advance: Callable[[int], object] = lambda _: None) -> Trace:
    """Reads a trace; `advance` is told how many bytes of the file each block took.

    Raises TraceError for what is no Chrome trace, and OSError. A file that ends early is read as far as it goes.
    """
    trace = Trace(path)
    columns, stream = _Columns(trace), EventStream(path, advance)
    for events in stream:
        columns.add(events)
    columns.close()
    trace.cut = stream.cut
    trace.damaged += stream.damaged
    return trace


class _Table:
    """Rows of one kind of event, kept as arrays block by block."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {column: [] for column in Events.__slots__}

    def add(self, **columns: list[int] | np.ndarray | int) -> None:
        size = len(columns["name"])
        for column, parts in self.parts.items():
            kind = np.int64 if column in ("start", "end", "correlation") else np.int32
            value = columns[column]
            parts.append(np.full(size, value, kind) if isinstance(value, int) else np.asarray(value, kind))

    def events(self) -> Events:
        """All rows; a column's parts are given up as soon as they are joined, so that memory is not needed twice."""
        joined = {}
        for column, parts in self.parts.items():
            joined[column] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            parts.clear()
        return Events(**joined)


class _Columns:
    """Sorts decoded events into a trace's tables."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.names: dict[str, int] = {}
        self.threads: dict[tuple, int] = {}
        self.devices: dict[tuple, int] = {}
        self.tables = {name: _Table() for name in ("ranges", "python", "calls", "device", "pauses")}
        self.open: dict[tuple, list[Event]] = {}

    def add(self, events: list[Event]) -> None:
        sorted_events: dict[str, list[Event]] = {name: [] for name in self.tables}
        for event in events:
            match event.ph:
                case "X":
                    self._place(event, sorted_events)
                case "B":
                    self.open.setdefault((event.pid, event.tid), []).append(event)
                case "E":
                    if (closed := self._closed(event)) is not None:
                        self._place(closed, sorted_events)
                case "M":
                    if event.name == "process_name" and event.args is not None and event.args.name is not None:
                        self.trace.processes[event.pid] = str(event.args.name)
        for name, rows in sorted_events.items():
            if rows:
                self._append(self.tables[name], rows, name)

    def close(self) -> None:
        """The tables, whole. Ranges that nothing closed have no end that could be used."""
        trace = self.trace
        trace.damaged += sum(map(len, self.open.values()))
        trace.names, trace.threads, trace.devices = list(self.names), list(self.threads), list(self.devices)
        for name, table in self.tables.items():
            setattr(trace, name, table.events())

    def _place(self, event: Event, tables: dict[str, list[Event]]) -> None:
        category = event.cat
        if event.ts is None or event.dur is None or event.dur < 0 or abs(event.ts) + event.dur > LATEST_US:
            self.trace.damaged += 1
        elif category in DEVICE:
            tables["device"].append(event)
        elif category in RUNTIME:
            tables["calls"].append(event)
        elif category in PYTHON:
            tables["python"].append(event)
        elif category == "Trace":
            begin, end = self.trace.recorded or (2**63 - 1, -(2**63))
            start = round(event.ts * 1e3)
            self.trace.recorded = min(begin, start), max(end, start + round((event.dur or 0) * 1e3))
        elif category == "wait" and event.name == "profiler":
            tables["pauses"].append(event)
        elif category not in IGNORED:
            tables["ranges"].append(event)

    def _closed(self, event: Event) -> Event | None:
        stack = self.open.get((event.pid, event.tid))
        if not stack or event.ts is None or stack[-1].ts is None:
            self.trace.damaged += 1
            return None
        begun = stack.pop()
        begun.dur = event.ts - begun.ts
        return begun

    def _append(self, table: _Table, rows: list[Event], kind: str) -> None:
        names, threads, devices = self.names, self.threads, self.devices
        start = np.rint(np.array([event.ts for event in rows]) * 1e3).astype(np.int64)
        duration = np.rint(np.array([event.dur or 0.0 for event in rows]) * 1e3).astype(np.int64)
        tied = kind in ("calls", "device")
        table.add(
            start=start,
            end=start + duration,
            name=[names.setdefault(event.name or "", len(names)) for event in rows],
            thread=[threads.setdefault((event.pid, event.tid), len(threads)) for event in rows],
            correlation=[_correlation(event) for event in rows] if tied else -1,
            device=[devices.setdefault(_device(event), len(devices)) for event in rows] if kind == "device" else -1,
        )


def _correlation(event: Event) -> int:
    found = None if event.args is None else event.args.correlation
    return -1 if found is None or not -1 <= found < 2**63 else found


def _device(event: Event) -> tuple[int | str | None, int | str | None]:
    """A device's row, and its number: merged traces may have moved the rows."""
    return event.pid, None if event.args is None else event.args.device
