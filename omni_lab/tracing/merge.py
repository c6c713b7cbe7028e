"""One trace of a whole pipeline: a row for each worker, and what went from one to the other.

The workers' traces lie on one clock already, and so do the rows of the step clock and of the payloads, so merging is
putting side by side. Every worker is a process of its own here, also where one process held them all.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from omni_lab.core import CLIENT
from omni_lab.metrics.phases import PHASES, STEP, WAITS
from omni_lab.metrics.records import ChunkRow, RequestRow, StepRow
from omni_lab.tracing.profiler import Event
from omni_lab.tracing.worker_trace import DEVICE, raw, span, step_name

CLIENT_PID = 1
LOOP_TID = 1
"""The thread of steps that only the step clock has."""

BETWEEN = ("payload", "send", "other", *WAITS, "schedule")
"""The phases before a step, in the order in which they are drawn: the step clock has their sums only."""

INSIDE_US = 0.5
"""An arrow begins and ends so far inside a step, before its first phase opens or after its last has closed."""


class Head(msgspec.Struct):
    """What a worker's trace says of itself."""

    worker: str
    thread: int
    window_ns: tuple[int, int]
    alignment_us: float
    clock: str = ""


class HeadOnly(msgspec.Struct):
    """A worker's trace without its events."""

    omni_lab: Head


class TraceFile(msgspec.Struct):
    """A worker's trace."""

    traceEvents: list[Event]
    omni_lab: Head
    baseTimeNanoseconds: int = 0
    deviceProperties: list[dict[str, Any]] = []


@dataclass(slots=True)
class Row:
    """A worker in the merged trace, its step loop's thread, and (start, end) in µs of each step that is drawn."""

    pid: int
    thread: int = LOOP_TID
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceFile)
_head_decoder = msgspec.json.Decoder(HeadOnly)


def merge_traces(
    out: Path | str,
    traces: Sequence[Path | str],
    steps: Sequence[StepRow] = (),
    chunks: Sequence[ChunkRow] = (),
    requests: Iterable[RequestRow] = (),
) -> float:
    """Writes the merged trace from the first window's start to the last one's end; the largest clock error in µs.

    `steps` draw the workers that were not captured, and the others outside of their windows, from the step clock. A
    hand-off, an audio chunk and a request is an asynchronous slice each; an arrow leads from the step that made a
    payload to the first step of the receiver that could use it. Requests without a row last from their prompt to their
    last payload. Raises ValueError if there is no trace, or a file is none.
    """
    if not traces:
        raise ValueError("merging expects at least one worker's trace, got none")
    heads = [read_head(path) for path in traces]
    window = min(head.window_ns[0] for head in heads), max(head.window_ns[1] for head in heads)
    drawn: dict[str, list[StepRow]] = {head.worker: [] for head in heads}
    for step in steps:
        if step.end_ns > window[0] and step.start_ns < window[1]:
            drawn.setdefault(f"{step.stage}_r{step.replica}", []).append(step)
    rows = {worker: Row(CLIENT_PID + number) for number, worker in enumerate(drawn, 1)}
    base_ns, devices = 0, []
    scratch = f"{out}.part"
    with gzip.open(scratch, "wb", compresslevel=6) as file:

        def write(events: Iterable[Event]) -> None:
            file.writelines(_encoder.encode(event) + b",\n" for event in events)

        file.write(b'{"traceEvents": [\n')
        for path, head in zip(traces, heads, strict=True):
            row, (start_ns, end_ns) = rows[head.worker], head.window_ns
            row.thread = head.thread
            trace = _decoder.decode(gzip.decompress(Path(path).read_bytes()))
            base_ns, devices = trace.baseTimeNanoseconds, devices or trace.deviceProperties
            own = drawn.pop(head.worker)
            write(clock_steps((step for step in own if step.end_ns <= start_ns), row, window[0]))
            write(moved(trace.traceEvents, row))
            write(clock_steps((step for step in own if step.start_ns >= end_ns), row, end_ns))
        for worker, own in drawn.items():
            write(labels(worker, rows[worker]))
            write(clock_steps(own, rows[worker], window[0]))
        crossing = [chunk for chunk in chunks if chunk.produced_ns < window[1] and chunk.received_ns > window[0]]
        write(handoffs(crossing, steps, chunks, rows))
        write(request_slices(requests, chunks, window))
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,
            "deviceProperties": devices,
            "omni_lab": {"clock": "time.monotonic_ns", "window_ns": window, "workers": heads},
        }
        last = Event("M", CLIENT_PID, 0, "process_name", args=raw({"name": CLIENT}))
        file.write(_encoder.encode(last) + b"\n]," + _encoder.encode(head)[1:] + b"\n")
    os.replace(scratch, out)
    return max(head.alignment_us for head in heads)


def read_head(path: Path | str) -> Head:
    """Raises ValueError if the file is no worker's trace of a capture."""
    try:
        return _head_decoder.decode(gzip.decompress(Path(path).read_bytes())).omni_lab
    except (msgspec.DecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: expected the trace of a captured worker: {error}") from None


def moved(events: Iterable[Event], row: Row) -> Iterator[Event]:
    """A worker's events under its own process number; device streams become threads of it."""
    streams: set[tuple[int | str, int | str]] = set()
    for event in events:
        if event.cat in DEVICE:
            stream = (event.pid, event.tid)
            event.tid = int(event.pid) * 1000 + int(event.tid)
            if stream not in streams:
                streams.add(stream)
                name = raw({"name": f"device {stream[0]} stream {stream[1]}"})
                yield Event("M", row.pid, event.tid, "thread_name", args=name)
        elif event.cat == "user_annotation" and event.name.startswith("step "):
            row.steps[int(event.name.split()[1])] = (event.ts, event.ts + (event.dur or 0.0))
        if isinstance(event.id, int):
            event.id += row.pid << 40
        event.pid = row.pid
        yield event
    yield Event("M", row.pid, 0, "process_sort_index", args=raw({"sort_index": row.pid}))


def labels(worker: str, row: Row) -> Iterator[Event]:
    """Names for a worker that has no trace."""
    yield Event("M", row.pid, 0, "process_name", args=raw({"name": worker}))
    yield Event("M", row.pid, row.thread, "thread_name", args=raw({"name": "step loop"}))
    yield Event("M", row.pid, 0, "process_sort_index", args=raw({"sort_index": row.pid}))


def clock_steps(steps: Iterable[StepRow], row: Row, since_ns: int) -> Iterator[Event]:
    """Steps that no trace has, with their phases, and the gaps before them, as far as they lie after `since_ns`.

    A step inside another one has no gap.
    """
    for step in steps:
        start, end = step.start_ns / 1e3, step.end_ns / 1e3
        row.steps[step.step] = (start, end)
        name = step_name(step.step, step.kind, step.batch, step.tokens)
        args = raw({f"{phase}_us": getattr(step, f"{phase}_ns") / 1e3 for phase in PHASES})
        yield Event("X", row.pid, row.thread, name, "step_clock", start, end - start, args=args)
        between = BETWEEN if step.schedule_ns else ()
        gap_us = sum(getattr(step, f"{phase}_ns") for phase in between) / 1e3
        for phases, at, low, high in ((between, start - gap_us, since_ns / 1e3, start), (STEP, start, start, end)):
            for phase in phases:
                lasts = getattr(step, f"{phase}_ns") / 1e3
                if max(at, low) < min(at + lasts, high):
                    yield span(phase, "step_clock", row.pid, row.thread, max(at, low), min(at + lasts, high))
                at += lasts


def handoffs(
    crossing: Iterable[ChunkRow], steps: Sequence[StepRow], chunks: Iterable[ChunkRow], rows: Mapping[str, Row]
) -> Iterator[Event]:
    """Each payload from made to received, and the arrow from step to step."""
    made_by = {(step.stage, step.end_ns): step for step in steps}
    routes: dict[tuple[str, str], int] = {}  # a payload carries the end of the step that made it: that names the worker
    for chunk in chunks:
        source = chunk.edge.partition("->")[0]
        if step := made_by.get((source, chunk.produced_ns)):
            routes[chunk.request, source] = step.replica
    for number, chunk in enumerate(crossing, 1):
        source, _, target = chunk.edge.partition("->")
        sender = rows.get(f"{source}_r{routes.get((chunk.request, source), 0)}")
        receiver = rows.get(f"{target}_r{routes.get((chunk.request, target), 0)}")
        pid = sender.pid if sender else CLIENT_PID
        name, kind = (f"{chunk.edge} {chunk.request} #{chunk.index}", "audio" if target == CLIENT else "handoff")
        facts = {"frames": chunk.frames, "bytes": chunk.bytes, "sent_us": chunk.sent_ns / 1e3, "final": chunk.final}
        yield Event("b", pid, 0, name, kind, chunk.produced_ns / 1e3, id=number, args=raw(facts))
        yield Event("e", pid, 0, name, kind, chunk.received_ns / 1e3, id=number)
        made = made_by.get((source, chunk.produced_ns))
        if made is None or sender is None or receiver is None or made.step not in sender.steps:
            continue
        used = min((start for start, _ in receiver.steps.values() if start >= chunk.received_ns / 1e3), default=None)
        if used is not None:
            end = sender.steps[made.step][1] - INSIDE_US
            yield Event("s", sender.pid, sender.thread, chunk.edge, "handoff", end, id=number)
            yield Event("f", receiver.pid, receiver.thread, chunk.edge, "handoff", used + INSIDE_US, id=number, bp="e")


def request_slices(
    requests: Iterable[RequestRow], chunks: Iterable[ChunkRow], window: tuple[int, int]
) -> Iterator[Event]:
    """Each request in the window, as the client saw it; else from its first payload to its last."""
    spans = {request.id: (request.sent_ns, request.end_ns) for request in requests}
    found: dict[str, tuple[int, int]] = {}
    for chunk in chunks:
        first, last = found.get(chunk.request, (chunk.produced_ns, chunk.received_ns))
        found[chunk.request] = (min(first, chunk.produced_ns), max(last, chunk.received_ns))
    for number, (request, (start_ns, end_ns)) in enumerate((found | spans).items(), 1):
        if start_ns < window[1] and end_ns > window[0]:
            name = f"request {request}"
            yield Event("b", CLIENT_PID, 0, name, "request", start_ns / 1e3, id=number, args=raw({"request": request}))
            yield Event("e", CLIENT_PID, 0, name, "request", end_ns / 1e3, id=number)
