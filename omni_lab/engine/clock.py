"""The step clock: every step of a worker in a preallocated ring, always on."""

from __future__ import annotations

import numpy as np

COLUMNS = ("name", "step", "start_ns", "end_ns", "idle_ns", "batch", "tokens", "kind")


class StepClock:
    """Records start, end, idle time before, batch, tokens and kind of each step in `capacity` rows.

    Names and kinds are interned. When the ring is full the oldest rows are overwritten and counted in
    `lost`, so that a reader can tell a complete record from an incomplete one.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.rows = np.zeros((capacity, len(COLUMNS)), dtype=np.int64)
        self.words: list[str] = []
        self.steps: dict[str, int] = {}
        self.count = 0

    def record(self, name: str, start_ns: int, end_ns: int, idle_ns: int, batch: int, tokens: int, kind: str) -> None:
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        row = (self._word(name), step, start_ns, end_ns, idle_ns, batch, tokens, self._word(kind))
        self.rows[self.count % len(self.rows)] = row
        self.count += 1

    def take(self) -> tuple[list[tuple], int]:
        """All rows since the last call, oldest first, as tuples in the order of COLUMNS, and how many were lost."""
        capacity = len(self.rows)
        lost = max(0, self.count - capacity)
        order = np.arange(lost, self.count) % capacity
        taken = [(self.words[row[0]], *row[1:7], self.words[row[7]]) for row in self.rows[order].tolist()]
        self.count = 0
        return taken, lost

    def _word(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)
