"""The profiler of this process, in pieces on disk, with the times of its events on `time.monotonic_ns`.

torch has one profiler a process, for all threads. What it has recorded lies in memory until it stops, so a long
recording is cut: the profiler stops, its piece is written as it is, and it starts again. `read_piece` gives the events
of a piece on the clock that all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

ANCHOR = "clock anchor"
ANCHORS, MOST_ANCHORS, TIGHT_NS = 8, 200, 20_000
"""Ranges at both ends of a piece that tie its clock to ours: so many, and more until one is known tightly."""

PIECE_MB, PIECE_S = 64.0, 5.0
"""A piece is cut at about so many MB of JSON, or after so long: to write one takes some tens of ms for each MB."""

PIECE = ".capture-"
"""How the names of pieces begin."""

Anchors = list[tuple[int, int]]
"""The monotonic times just before and just after each anchor began."""


class CaptureError(RuntimeError):
    """A capture cannot start, or cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to record beside operators and ranges, and the directory for the pieces."""

    directory: str
    stacks: bool = False
    memory: bool = False


@dataclass(slots=True)
class Piece:
    """One file of the profiler's own, with the anchors at its beginning and at its end."""

    path: Path
    first: Anchors
    last: Anchors = field(default_factory=list)
    nbytes: int = 0


class Event(msgspec.Struct, omit_defaults=True):
    """An event of the trace event format; `ts` and `dur` in µs. `args` stay bytes until somebody needs them."""

    ph: str
    pid: int | str
    tid: int | str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float | None = None
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _File(msgspec.Struct):
    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0
    deviceProperties: list[dict[str, Any]] = []


@dataclass(slots=True)
class Aligned:
    """The events of a piece, `ts` in µs of `time.monotonic_ns`, at most `error_us` off."""

    events: list[Event]
    devices: list[dict[str, Any]]
    error_us: float


_decoder = msgspec.json.Decoder(_File)


class Profiler(Protocol):
    """One that records in this process, or in that of a stage's network."""

    def start(self, options: Options) -> Anchors: ...

    def stop(self, path: Path | None) -> tuple[Anchors, int]: ...


class Recorder:
    """Records while anybody wants it: with all stages in one process, their captures share one recording.

    A capture calls `open`, then `start` and `stop` around its window and `step` after each of its steps, `cut` when
    that is `due`, takes the `pieces`, and calls `close`: with the last one the files go.
    """

    def __init__(self, profiler: Profiler, label: str = "") -> None:
        self.profiler = profiler
        self.label = label
        self.options: Options | None = None
        self.opened = 0
        self.running = 0
        self.pieces: list[Piece] = []
        self.warm = False
        self.steps = 0
        self.began = 0.0
        self.written_steps = 0

    @property
    def written_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def expected_bytes(self) -> int | None:
        """Bytes of all pieces, the running one as large a step as those before; None before the first is written."""
        return round(self.written_bytes + self.steps * self._step_bytes) if self.written_steps else None

    @property
    def _step_bytes(self) -> float:
        return self.written_bytes / self.written_steps

    def open(self, options: Options) -> None:
        """Raises CaptureError if a capture with other options runs in this process, or any other profiler does."""
        if self.opened and options != self.options:
            raise CaptureError(f"a capture into {self.options.directory} runs in this process; stop it first")
        if not self.warm:  # loading the profiler's libraries takes a second or two
            self.profiler.start(options)
            self.profiler.stop(None)
            self.warm = True
        self.options = options
        self.opened += 1

    def start(self) -> None:
        if not self.running:
            self._begin()
        self.running += 1

    def step(self) -> None:
        """A step of one of the captures has ended."""
        self.steps += 1

    @property
    def due(self) -> bool:
        """Whether the running piece should be cut: the first one after a step, to know how large that is."""
        if not self.written_steps:
            return self.steps > 0
        return self.steps * self._step_bytes > PIECE_MB * 1e6 or time.monotonic() - self.began > PIECE_S

    def stop(self) -> None:
        self.running -= 1
        if not self.running:
            self._end()

    def cut(self) -> None:
        """Everything recorded so far is in `pieces`, and whoever records goes on in a new one."""
        if self.running:
            self._end()
            self._begin()

    def close(self) -> None:
        self.opened -= 1
        if not self.opened:
            if self.running:  # a capture failed within its window
                with suppress(CaptureError, OSError, RuntimeError):
                    self.profiler.stop(None)
            self.running = 0
            for piece in self.pieces:
                piece.path.unlink(missing_ok=True)
            self.pieces = []
            self.written_steps = 0

    def _begin(self) -> None:
        name = f"{PIECE}{os.getpid()}{self.label}-{len(self.pieces)}.json"
        self.piece = Piece(Path(self.options.directory) / name, self.profiler.start(self.options))
        self.steps, self.began = 0, time.monotonic()

    def _end(self) -> None:
        self.piece.last, self.piece.nbytes = self.profiler.stop(self.piece.path)
        self.pieces.append(self.piece)
        self.written_steps += self.steps
        self.steps = 0


class LocalProfiler:
    """torch's profiler in this process."""

    def __init__(self) -> None:
        self.running: profile | None = None

    def start(self, options: Options) -> Anchors:
        """The anchors at the beginning. Raises CaptureError if another profiler runs."""
        profiler = profile(
            with_stack=options.stacks,
            profile_memory=options.memory,
            # torch reports no allocation to a profiler of all threads
            experimental_config=_ExperimentalConfig(profile_all_threads=not options.memory),
        )
        try:
            profiler.start()
        except RuntimeError as error:
            raise CaptureError(f"the profiler cannot start ({error}); end any other profiler of this process") from None
        self.running = profiler
        return take_anchors()

    def stop(self, path: Path | None) -> tuple[Anchors, int]:
        """Writes what was recorded, if there is a path; the anchors at the end and the bytes written."""
        if self.running is None:
            raise CaptureError("the profiler does not run: a piece could not be written")
        anchors = take_anchors()
        profiler, self.running = self.running, None
        profiler.stop()
        if path is None:
            return anchors, 0
        profiler.export_chrome_trace(str(path))
        return anchors, path.stat().st_size


RECORDER = Recorder(LocalProfiler())
"""That of this process."""


def take_anchors() -> Anchors:
    """Also where the processor is taken away now and then."""
    anchors = [anchor() for _ in range(ANCHORS)]
    while min(after - before for before, after in anchors) > TIGHT_NS and len(anchors) < MOST_ANCHORS:
        anchors.append(anchor())
    return anchors


def anchor() -> tuple[int, int]:
    """Opens and closes a range; the monotonic times just before and just after it began."""
    mark = record_function(ANCHOR)
    before = time.monotonic_ns()
    mark.__enter__()
    after = time.monotonic_ns()
    mark.__exit__(None, None, None)
    return before, after


def read_piece(piece: Piece) -> Aligned:
    """The events of a piece without its anchors and the profiler's own rows, on `time.monotonic_ns`.

    Each anchor's start lies between two monotonic times, so it bounds the difference of the clocks from both sides, and
    all anchors at one end of the piece together bound it closer than any alone. Between the two ends the difference is
    interpolated; half the wider bound is the error. Raises CaptureError if anchors are missing.
    """
    file = _decoder.decode(piece.path.read_bytes())
    starts = sorted(event.ts for event in file.traceEvents if event.name == ANCHOR and event.cat == "user_annotation")
    anchors = [*piece.first, *piece.last]
    if len(starts) != len(anchors):
        message = f"{piece.path}: expected {len(anchors)} clock anchors, found {len(starts)}; capture again"
        raise CaptureError(message)
    pairs = list(zip(starts, anchors, strict=True))
    first, first_error = _difference(pairs[: len(piece.first)])
    last, last_error = _difference(pairs[len(piece.first) :])
    slope = (last - first) / max(starts[-1] - starts[0], 1.0)
    events = [event for event in file.traceEvents if event.name != ANCHOR and isinstance(event.tid, int) and event.cat]
    for event in events:
        event.ts -= first + slope * (event.ts - starts[0])
    return Aligned(events, file.deviceProperties, max(first_error, last_error))


def _difference(pairs: list[tuple[float, tuple[int, int]]]) -> tuple[float, float]:
    """Profiler's clock minus monotonic clock in µs, and half the width of the bound."""
    low = max(start - after / 1e3 for start, (_, after) in pairs)
    high = min(start - before / 1e3 for start, (before, _) in pairs)
    return (low + high) / 2, abs(high - low) / 2
