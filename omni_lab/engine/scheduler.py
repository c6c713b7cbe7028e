"""Who takes part in the next step."""

from __future__ import annotations

from omni_lab.engine.stage import Sequence, Stage


class ContinuousBatching:
    """Autoregressive stages: sequences join and leave the running batch between any two steps.

    A running sequence owns one cache row from its prefill to its end. Rows are dense: the batch is always
    rows 0..B-1, so a decode step works on views; when a sequence leaves, the last row moves into its place.
    A row holds a full-length sequence and there are only as many rows as the memory budget pays for, so what
    is admitted can always finish. With one row this is a stage without batching.
    """

    def __init__(self, stage: Stage, rows: int, prefill_tokens: int = 4096) -> None:
        self.stage = stage
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> tuple[str, list[Sequence]] | None:
        """The next step: prefill first (it is what a new request waits for), else decode."""
        free = self.rows - len(self.running)
        if free and self.waiting:
            ready = [sequence for sequence in self.waiting if self.stage.next_step(sequence) == "prefill"]
            batch = self._within_budget(ready[:free])
            if batch:
                for sequence in batch:
                    self.waiting.remove(sequence)
                    sequence.row = len(self.running)
                    self.running.append(sequence)
                return "prefill", batch
        batch = [sequence for sequence in self.running if self.stage.next_step(sequence) == "decode"]
        return ("decode", batch) if batch else None

    def remove(self, sequence: Sequence) -> None:
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        last = self.running.pop()
        if last is not sequence:
            self.stage.move(last.row, sequence.row)
            last.row = sequence.row
            self.running[last.row] = last
        sequence.row = -1

    def _within_budget(self, ready: list[Sequence]) -> list[Sequence]:
        """As many as fit into one prefill step; a prompt above the budget runs alone."""
        batch, tokens = [], 0
        for sequence in ready:
            tokens += self.stage.prompt_tokens(sequence)
            if batch and tokens > self.prefill_tokens:
                break
            batch.append(sequence)
        return batch


class FirstComeBatching:
    """Generation stages (no state between steps on the device): whoever has input, in order of arrival."""

    def __init__(self, stage: Stage, max_batch: int) -> None:
        self.stage = stage
        self.max_batch = max_batch
        self.sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)

    def schedule(self) -> tuple[str, list[Sequence]] | None:
        """The first sequence that is ready decides the kind of the step; others of that kind join it."""
        kind, batch = None, []
        for sequence in self.sequences:
            ready = self.stage.next_step(sequence)
            if ready is not None and ready == (kind or ready):
                kind = ready
                batch.append(sequence)
                if len(batch) == self.max_batch:
                    break
        return (kind, batch) if kind else None

    def remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
