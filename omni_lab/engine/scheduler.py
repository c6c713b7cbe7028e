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
            batch = within_budget(self.stage, ready[:free], self.prefill_tokens)
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


class LeastServedBatching:
    """Generation stages (no cache rows): whoever has input, the least served first.

    So a request's first chunk does not wait behind the later chunks of others. A step takes at most `max_batch`
    sequences and `step_tokens` tokens, because everybody in it waits for all of it; one sequence is always taken.
    """

    def __init__(self, stage: Stage, max_batch: int, step_tokens: int) -> None:
        self.stage = stage
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self.sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)

    def schedule(self) -> tuple[str, list[Sequence]] | None:
        """The least served sequence that is ready decides the kind of the step; others of that kind join it."""
        ready = [sequence for sequence in self.sequences if not sequence.held and self.stage.next_step(sequence)]
        ready.sort(key=lambda sequence: sequence.steps)
        if not ready:
            return None
        kind = self.stage.next_step(ready[0])
        ready = [sequence for sequence in ready if self.stage.next_step(sequence) == kind]
        return kind, within_budget(self.stage, ready[: self.max_batch], self.step_tokens)

    def remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)


def within_budget(stage: Stage, ready: list[Sequence], budget: int) -> list[Sequence]:
    """As many, in order, as fit into one step of `budget` tokens; one above the budget runs alone."""
    batch, tokens = [], 0
    for sequence in ready:
        tokens += stage.step_tokens(sequence)
        if batch and tokens > budget:
            break
        batch.append(sequence)
    return batch
