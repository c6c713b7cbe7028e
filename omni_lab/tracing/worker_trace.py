"""From the profiler's pieces to the trace of one worker: `<stage>_r<replica>.pt.trace.json.gz`.

Its times are µs of `time.monotonic_ns`, so traces of different processes lie on one clock. Rows are the threads of the
worker and its device streams; ranges are its steps, their phases, and what it waited for.
"""

from __future__ import annotations

import gzip
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from omni_lab.connectors.wire import StartCapture
from omni_lab.tracing.profiler import Aligned, Event, Piece, read_piece

DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"))
RANGES = frozenset(("user_annotation", "gpu_user_annotation"))

SLACK_US = 5.0
"""Around the times when a worker has the thread; another worker's operators never begin so soon."""

NEVER_TIES_US = 0.001
"""A profiler step begins so much before the step itself, so that any viewer nests them the right way round."""


@dataclass(slots=True)
class Recorded:
    """What a capture noted beside the profiler. Times in ns of `time.monotonic_ns`.

    `thread` is the step loop's, `builder` the output path's own, if it has one. `steps`: kind, batch and tokens by
    number; `waits` and `beside`: (phase, start, end) of the two threads; `network`: pieces of the network's process,
    if it has one, which become threads of the worker.
    """

    title: str
    thread: int
    builder: int | None = None
    steps: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    beside: list[tuple[str, int, int]] = field(default_factory=list)
    network: list[Piece] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """Sizes of a trace file and before compression, and the largest error of its times."""

    nbytes: int
    json_bytes: int
    error_us: float


class Arguments(msgspec.Struct):
    """What of an event's arguments joins what a device did to its launch."""

    correlation: int | None = None


_encoder = msgspec.json.Encoder()
_arguments = msgspec.json.Decoder(Arguments)


def trace_path(directory: Path | str, title: str) -> Path:
    """Where a worker's trace lies: TensorBoard's profiler plugin takes the part before `.pt` for the worker's name."""
    return Path(directory) / f"{title}.pt.trace.json.gz"


def range_name(title: str, name: str) -> str:
    """The name of a worker's range inside the profiler, which workers may share."""
    return f"{title}|{name}"


def step_name(number: int, kind: str, batch: int, tokens: int) -> str:
    return f"step {number} {kind} batch={batch} tokens={tokens}"


def write_worker_trace(path: str, recorded: Recorded, pieces: Iterable[Piece], order: StartCapture) -> Written:
    """Raises CaptureError if a piece has no clock anchors, OSError if the file cannot be written."""
    own = Own(recorded, order.shared)
    devices: list[dict[str, Any]] = []
    starts: dict[int, float] = {}
    error_us, size = 0.0, 0
    scratch = f"{path}.part"
    with gzip.open(scratch, "wb", compresslevel=6) as file:
        size += file.write(b'{"traceEvents": [\n')
        for event in names(os.getpid(), recorded):
            size += file.write(_encoder.encode(event) + b",\n")
        for piece in pieces:
            aligned = read_piece(piece)
            devices, error_us = aligned.devices or devices, max(error_us, aligned.error_us)
            for event in own.events(aligned):
                renamed(event, recorded, starts)
                size += file.write(_encoder.encode(event) + b",\n")
        named: set[int | str] = set()
        for piece in recorded.network:
            aligned = read_piece(piece)
            error_us = max(error_us, aligned.error_us)
            for event in threads_of(aligned.events, recorded, named):
                size += file.write(_encoder.encode(event) + b",\n")
        for event in drawn(recorded, starts):
            size += file.write(_encoder.encode(event) + b",\n")
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": order.base_ns,
            "deviceProperties": devices,
            "omni_lab": {
                "worker": recorded.title,
                "thread": recorded.thread,
                "clock": "time.monotonic_ns",
                "window_ns": [recorded.start_ns, recorded.end_ns],
                "alignment_us": error_us,
                "steps": len(recorded.steps),
                "stopped_by": recorded.stopped_by,
                "events_of_others": own.others,
            },
        }
        end = _encoder.encode(Event("M", os.getpid(), 0, "process_labels", args=raw({"labels": recorded.title})))
        size += file.write(end + b"\n]," + _encoder.encode(head)[1:] + b"\n")
    os.replace(scratch, path)
    return Written(os.path.getsize(path), size, error_us)


class Own:
    """Which events of a process are a worker's: all of its own process; of a shared one those that began while it had
    the thread, those of its builder thread, and what both launched on a device. The rest is counted in `others`.
    """

    def __init__(self, recorded: Recorded, shared: bool) -> None:
        self.recorded = recorded
        self.shared = shared
        self.others = 0
        ends = [start for _, start, _ in recorded.waits] + [recorded.end_ns]
        starts = [recorded.start_ns] + [end for _, _, end in recorded.waits]
        self.starts = [start / 1e3 - SLACK_US for start in starts]
        self.ends = [end / 1e3 + SLACK_US for end in ends]

    def events(self, aligned: Aligned) -> Iterator[Event]:
        events = [event for event in aligned.events if event.ts >= self.starts[0]]  # not of the steps before
        if not self.shared:
            yield from events
            return
        launched = set()
        for event in events:
            if event.cat in DEVICE:
                continue
            if not self._host(event):
                self.others += 1
                continue
            if event.cat.startswith("cuda"):
                launched.add(_arguments.decode(event.args).correlation)
            yield event
        for event in events:
            if event.cat in DEVICE:
                if _arguments.decode(event.args).correlation in launched:
                    yield event
                else:
                    self.others += 1

    def _host(self, event: Event) -> bool:
        if event.cat in RANGES:
            return event.name.startswith(f"{self.recorded.title}|")
        if event.tid != self.recorded.thread:
            return event.tid == self.recorded.builder
        place = bisect_right(self.starts, event.ts) - 1
        return place >= 0 and event.ts <= self.ends[place]


def threads_of(events: Iterable[Event], recorded: Recorded, named: set[int | str]) -> Iterator[Event]:
    """The events of the network's process in the window, as threads of its worker; `named` has those with a name."""
    for event in events:
        if event.ts * 1e3 < recorded.start_ns:
            continue
        if event.cat not in DEVICE:
            event.pid = os.getpid()
            if event.tid not in named:
                named.add(event.tid)
                yield Event("M", event.pid, event.tid, "thread_name", args=raw({"name": "network"}))
        yield event


def renamed(event: Event, recorded: Recorded, starts: dict[int, float]) -> None:
    """Gives a range its name in the trace; notes when each step started."""
    title, bar, name = event.name.partition("|")
    if event.cat not in RANGES or title != recorded.title or not bar:
        return
    event.name = name
    if name.startswith("step "):
        number = int(name.removeprefix("step "))
        if number not in recorded.steps:  # it never ended, or it failed
            return
        kind, batch, tokens = recorded.steps[number]
        event.name = step_name(number, kind, batch, tokens)
        stage, _, replica = title.rpartition("_r")
        event.args = raw(
            {"stage": stage, "replica": int(replica), "step": number, "kind": kind, "batch": batch, "tokens": tokens}
        )
        if event.cat == "user_annotation":
            starts[number] = event.ts


def drawn(recorded: Recorded, starts: dict[int, float]) -> Iterator[Event]:
    """What the profiler has no range for: waits, the builder's phases, and TensorBoard's steps.

    A profiler step lasts from the start of a step to the start of the next, as `torch.profiler.profile.step` would have
    it; that cannot serve several stages of one process.
    """
    pid = os.getpid()
    for phase, start_ns, end_ns in recorded.waits:
        if start_ns >= recorded.start_ns:
            yield span(phase, "wait", pid, recorded.thread, start_ns / 1e3, end_ns / 1e3)
    for phase, start_ns, end_ns in recorded.beside:
        if start_ns >= recorded.start_ns:
            yield span(phase, "user_annotation", pid, recorded.builder or 0, start_ns / 1e3, end_ns / 1e3)
    numbers = sorted(starts)
    ends = [starts[number] for number in numbers[1:]] + [recorded.end_ns / 1e3]
    for number, end in zip(numbers, ends, strict=True):
        start = starts[number] - NEVER_TIES_US
        yield span(f"ProfilerStep#{number}", "user_annotation", pid, recorded.thread, start, end - 2 * NEVER_TIES_US)


def names(pid: int, recorded: Recorded) -> Iterator[Event]:
    yield Event("M", pid, 0, "process_name", args=raw({"name": recorded.title}))
    yield Event("M", pid, recorded.thread, "thread_name", args=raw({"name": "step loop"}))
    if recorded.builder is not None:
        yield Event("M", pid, recorded.builder, "thread_name", args=raw({"name": "output path"}))


def span(name: str, category: str, pid: int, tid: int, start: float, end: float) -> Event:
    """A range from `start` to `end`, in µs."""
    return Event("X", pid, tid, name, category, start, max(0.0, end - start), args=raw({}))


def raw(values: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(values))
