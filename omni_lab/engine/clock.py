"""The step clock: what a worker does at every moment, and each of its steps in a preallocated ring. Always on."""

from __future__ import annotations

import struct
from time import monotonic_ns

import numpy as np

from omni_lab.metrics.phases import PHASES

IDLE, INPUT, SLOT, SCHEDULE, PREPARE, FORWARD, SAMPLE, PAYLOAD, SEND, OTHER = range(len(PHASES))

COLUMNS = ("name", "step", "start_ns", "end_ns", "batch", "tokens", "kind", *(f"{phase}_ns" for phase in PHASES))


class PhaseTimer:
    """Time by phase. Exactly one phase runs at every moment, so the phases add up to the time that has passed."""

    def __init__(self) -> None:
        self.totals = [0] * len(PHASES)
        self.phase = OTHER
        self.since = monotonic_ns()

    def enter(self, phase: int) -> None:
        """The running phase ends here and `phase` begins, at `since`."""
        now = monotonic_ns()
        self.totals[self.phase] += now - self.since
        self.phase = phase
        self.since = now

    def rename(self, phase: int) -> None:
        """The running phase has been `phase` all along: looking for work and finding none is waiting too."""
        self.phase = phase


class StepClock(PhaseTimer):
    """A row for each step: start, end, batch, tokens, kind, and the time in each phase since the step before.

    A step is the time in prepare, forward and sample; whatever else happened since the step before is its gap, so the
    causes of a gap add up to it. Names and kinds are interned. When the ring of `capacity` rows is full the oldest are
    overwritten and counted, so that a reader can tell a complete record from an incomplete one.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        super().__init__()
        self.row = struct.Struct(f"{len(COLUMNS)}q")
        self.ring = bytearray(capacity * self.row.size)
        self.capacity = capacity
        self.words: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.count = 0

    def record(self, name: str, batch: int, tokens: int, kind: str) -> int:
        """The step that just ended, its result on the host: it ended, and the payload phase began, when this says."""
        if self.phase < PAYLOAD:  # a step that failed on its way
            self.enter(PAYLOAD)
        spent, end_ns, words = self.totals, self.since, self.words
        start_ns = end_ns - spent[PREPARE] - spent[FORWARD] - spent[SAMPLE]
        step = self.steps.get(name, 0)
        for word in (name, kind):
            if word not in words:
                words[word] = len(words)
        place = self.count % self.capacity * self.row.size
        self.row.pack_into(self.ring, place, words[name], step, start_ns, end_ns, batch, tokens, words[kind], *spent)
        self.steps[name] = step + 1
        self.count += 1
        self.totals = [0] * len(PHASES)
        return end_ns

    def add(self, name: str, start_ns: int, end_ns: int, batch: int, tokens: int, kind: str) -> None:
        """A step inside the running one, such as a stage of a model that runs as a whole: a row without a gap."""
        running = self.phase, self.since, self.totals
        self.phase, self.since, self.totals = PAYLOAD, end_ns, [0] * len(PHASES)
        self.totals[FORWARD] = end_ns - start_ns
        self.record(name, batch, tokens, kind)
        self.phase, self.since, self.totals = running

    def take(self) -> tuple[list[tuple], int]:
        """All rows since the last call, oldest first, as tuples in the order of COLUMNS, and how many were lost."""
        lost = max(0, self.count - self.capacity)
        rows = np.frombuffer(self.ring, np.int64).reshape(self.capacity, len(COLUMNS))
        order = np.arange(lost, self.count) % self.capacity
        words = list(self.words)
        taken = [(words[row[0]], *row[1:6], words[row[6]], *row[7:]) for row in rows[order].tolist()]
        self.count = 0
        return taken, lost


def cost_us(steps: int = 4_000) -> float:
    """What the clock costs a step on this machine, in µs: every phase once and the row, the best of five rounds."""

    def round_us() -> float:
        clock, start_ns = StepClock(), monotonic_ns()
        for _ in range(steps):
            clock.enter(SCHEDULE)
            clock.enter(PREPARE)
            clock.enter(FORWARD)
            clock.enter(SAMPLE)
            clock.enter(PAYLOAD)
            clock.record("talker", 16, 16, "decode")
            clock.enter(SEND)
            clock.enter(OTHER)
        return (monotonic_ns() - start_ns) / steps / 1e3

    return min(round_us() for _ in range(5))
