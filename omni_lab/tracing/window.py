"""The capture of one worker: so many of its steps, with all that the profiler sees in them.

Nothing of this runs while nothing is captured: a capture hangs itself into the clock of its worker and leaves when its
window ends.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.profiler import record_function

from omni_lab.connectors.wire import Captured, Capturing, StartCapture
from omni_lab.engine.clock import IDLE, PHASES, SCHEDULE, PhaseTimer, StepClock
from omni_lab.metrics.phases import STEP, WAITS
from omni_lab.tracing.profiler import RECORDER, CaptureError, Options
from omni_lab.tracing.worker_trace import Recorded, range_name, trace_path, write_worker_trace

WAITING = frozenset(PHASES.index(phase) for phase in WAITS)
STEPPING = frozenset(PHASES.index(phase) for phase in STEP)

TELL_S = 1.0
"""While it records the client hears of it at most so often."""


class Named(Protocol):
    """A stage's name."""

    name: str


class Captures(Protocol):
    """What a capture needs of its worker."""

    clock: StepClock
    output: Any
    replica: int
    stage: Named


class WorkerCapture:
    """Counts the steps to skip, records the steps of the window, writes the trace when it is asked for.

    States: "idle", "waiting" (for the steps to skip), "recording", "recorded" (until the trace is asked for).
    `tell` hears how far it is. What goes wrong inside a step is kept for the answer: the worker goes on.
    """

    def __init__(self, worker: Captures, tell: Callable[[Capturing], None]) -> None:
        self.worker = worker
        self.tell = tell
        self.title = f"{worker.stage.name}_r{worker.replica}"
        self.recorders = [RECORDER, *([worker.stage.recorder] if hasattr(worker.stage, "recorder") else [])]
        self.state = "idle"
        self.error = ""

    def start(self, order: StartCapture) -> Capturing:
        """Get ready. The answer says what is in the way, if anything is."""
        try:
            if self.state != "idle":
                raise CaptureError("a capture runs already; stop it first")
            if not os.access(order.directory, os.W_OK):
                raise CaptureError(f"expected a directory that can be written, got {order.directory}")
            self._open_recorders(Options(order.directory, order.stacks, order.memory))
        except CaptureError as error:
            return self._progress(f"{self.title}: {error}")
        self.order, self.skip, self.error, self.told = order, order.skip_steps, "", 0.0
        beside = getattr(self.worker.output, "thread", None)
        self.recorded = Recorded(self.title, threading.get_native_id(), beside.native_id if beside else None)
        self.state = "waiting"
        self.worker.clock.record = self._record
        if self.skip < 2:
            self._start()
        if self.skip < 1 and self.state == "waiting":
            self._open()
        return self._progress(self.error)

    def stop(self) -> Captured:
        """End the window if it is open, and write what was recorded."""
        captured = Captured(self.worker.stage.name, self.worker.replica)
        if self.state == "idle":
            captured.error = f"{self.title}: no capture runs; start one first"
            return captured
        if self.state == "recording":
            self._end("stopped")
        elif self.state == "waiting" and self.skip < 2:
            with self._pause():
                self._each("stop")
        self._unhook()
        recorded = self.recorded
        captured.steps, captured.stopped_by = len(recorded.steps), recorded.stopped_by
        captured.start_ns, captured.end_ns = recorded.start_ns, recorded.end_ns
        try:
            if not self.error and recorded.steps:
                self._each("cut")
                captured.path = str(trace_path(self.order.directory, self.title))
                recorded.network = [piece for recorder in self.recorders[1:] for piece in recorder.pieces]
                written = write_worker_trace(captured.path, recorded, RECORDER.pieces, self.order)
                captured.bytes, captured.json_bytes = written.nbytes, written.json_bytes
                captured.alignment_us = written.error_us
        except (CaptureError, OSError, ValueError, RuntimeError) as error:
            self.error, captured.path = f"the trace cannot be written: {error}", ""
        finally:
            self._each("close")
            self.state = "idle"
        if not captured.path:
            captured.error = f"{self.title}: {self.error or self._nothing()}"
        return captured

    def close(self) -> None:
        """The worker ends: what was recorded is dropped, with its files."""
        if self.state != "idle":
            self.error = "the worker was closed"
            self.stop()

    def _nothing(self) -> str:
        skipped = self.order.skip_steps - self.skip
        if self.recorded.stopped_by == "max_mb":
            return f"no step was recorded, because one alone is larger than max_mb {self.order.max_mb:g}; raise it"
        if self.skip:
            return (
                f"no step was recorded, because it took only {skipped} steps and skip_steps is "
                f"{self.order.skip_steps}; skip fewer or send more requests"
            )
        return "no step was recorded, because it took none in the window; send requests while the capture runs"

    def _record(self, name: str, batch: int, tokens: int, kind: str) -> int:
        """In the place of the clock's `record`."""
        clock = self.worker.clock
        number = clock.steps.get(name, 0)
        ended_ns = StepClock.record(clock, name, batch, tokens, kind)
        if name != self.worker.stage.name:  # a step inside the step
            return ended_ns
        if self.state == "recording":
            self.recorded.steps[number] = (kind, batch, tokens)
            self._stepped()
        elif self.state == "waiting":
            self._skipped()
        return ended_ns

    def _enter(self, phase: int) -> None:
        """In the place of the clock's `enter`: ranges for what the worker does, notes of what it waits for."""
        clock = self.worker.clock
        if phase == SCHEDULE:
            self._keep_bounds()
        if self.state != "recording":
            PhaseTimer.enter(clock, phase)
            return
        before, since = clock.phase, clock.since
        self._close_range()
        if phase not in STEPPING:
            self._close_step()
        PhaseTimer.enter(clock, phase)
        if before in WAITING:
            self.recorded.waits.append((PHASES[before], since, clock.since))
        if phase in STEPPING and self.step is None:
            self.deadline = min(self.deadline, time.monotonic() + self.order.max_s)
            self.step = self._opened(f"step {clock.steps.get(self.worker.stage.name, 0)}")
        if phase not in WAITING:
            self.range = self._opened(PHASES[phase])

    def _rename(self, phase: int) -> None:
        """In the place of the clock's `rename`: a range for work ends where waiting goes on."""
        self._close_range()
        PhaseTimer.rename(self.worker.clock, phase)

    def _enter_beside(self, phase: int) -> None:
        """In the place of `enter` of the output path's own thread, whose ranges are drawn from these notes."""
        timer = self.worker.output.beside
        before, since = timer.phase, timer.since
        PhaseTimer.enter(timer, phase)
        if before not in WAITING:
            self.recorded.beside.append((PHASES[before], since, timer.since))

    def _skipped(self) -> None:
        """The last step before the window is recorded too, to know how large one is, and thrown away."""
        self.skip -= 1
        if self.skip == 1:
            self._start()
        elif not self.skip:
            self._each("step")
            with self._pause():
                self._each("cut")
            if self.state == "waiting":
                self._open()

    def _start(self) -> None:
        with self._pause():
            self._each("start")

    def _open(self) -> None:
        clock = self.worker.clock
        with self._pause():
            self.state = "recording"
            self.step = self.range = None
            self.recorded.start_ns = time.monotonic_ns()
            self.deadline = math.inf  # until the first step
            clock.enter, clock.rename = self._enter, self._rename
            if hasattr(self.worker.output, "beside"):
                self.worker.output.beside.enter = self._enter_beside
        self._tell()

    def _stepped(self) -> None:
        self._each("step")
        if len(self.recorded.steps) == self.order.steps:
            self._end("steps")
        elif time.monotonic() > self.told + TELL_S:
            self._tell()

    def _keep_bounds(self) -> None:
        """Between two turns, also of a worker that takes no step: its process may record on for others."""
        expected = self._expected_bytes
        if time.monotonic() > self.deadline:
            self._end("max_s")
        elif expected and expected > self.order.max_mb * 1e6:
            self._end("max_mb")
        elif any(recorder.due for recorder in self.recorders):
            self._close_range()
            with self._pause():
                self._each("cut")

    def _end(self, reason: str) -> None:
        self.recorded.stopped_by = reason
        self._close_range()
        self._close_step()
        self._unhook()
        with self._pause():
            self.recorded.end_ns = self.worker.clock.since
            self._each("stop")
            self.state = "recorded"
        self._tell()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """What the profiler needs for itself is no work of the stage, and its failure none of the worker's."""
        clock, waits = self.worker.clock, self.recorded.waits
        phase, since = clock.phase, clock.since
        PhaseTimer.enter(clock, IDLE)
        began = clock.since
        if self.state == "recording" and phase in WAITING:
            waits.append((PHASES[phase], since, began))
        try:
            yield
        except (CaptureError, OSError, RuntimeError) as error:
            self.error, self.state = str(error), "recorded"
            self._unhook()
        PhaseTimer.enter(clock, phase)
        if self.state == "recording":
            waits.append(("profiler", began, clock.since))

    def _unhook(self) -> None:
        output = self.worker.output
        for holder, name in (
            (self.worker.clock, "record"),
            (self.worker.clock, "enter"),
            (self.worker.clock, "rename"),
            (getattr(output, "beside", output), "enter"),
        ):
            vars(holder).pop(name, None)

    def _opened(self, name: str) -> record_function:
        opened = record_function(range_name(self.title, name))
        opened.__enter__()
        return opened

    def _close_range(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None

    def _close_step(self) -> None:
        if self.step is not None:
            self.step.__exit__(None, None, None)
            self.step = None

    def _progress(self, error: str = "") -> Capturing:
        steps = 0 if self.state == "idle" else len(self.recorded.steps)
        name, replica = self.worker.stage.name, self.worker.replica
        return Capturing(name, replica, self.state, steps, self._expected_bytes, error)

    @property
    def _expected_bytes(self) -> int | None:
        """Of all pieces, if any recorder knows."""
        known = [size for recorder in self.recorders if (size := recorder.expected_bytes) is not None]
        return sum(known) if known else None

    def _each(self, doing: str) -> None:
        for recorder in self.recorders:
            getattr(recorder, doing)()

    def _open_recorders(self, options: Options) -> None:
        """All or none. The stage's own recorder is that of its network's process."""
        opened = []
        try:
            for recorder in self.recorders:
                recorder.open(options)
                opened.append(recorder)
        except CaptureError:
            for recorder in opened:
                recorder.close()
            raise

    def _tell(self) -> None:
        self.told = time.monotonic()
        self.tell(self._progress(self.error))
