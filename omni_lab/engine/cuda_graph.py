"""Captured steps on CUDA: the eager step recorded once for each bucket of (batch, window) and replayed.

Not verified on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_lab.engine.compiled import GraphRefused, compare
from omni_lab.engine.traced import TracedStep

WARM_UP = 3
"""Eager runs before a recording: libraries set up their workspaces in the first ones."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One CUDA graph with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


class CudaGraphs:
    """The graphs of one step, for batches of 1, 2, 4, ... rows and windows of 256, 512, ... positions.

    All are recorded, and compared with the eager step, before there is traffic. Outputs are overwritten by the next
    replay of the same bucket. Raises GraphRefused if a recording computes something else than the eager step.
    """

    def __init__(self, step: TracedStep) -> None:
        self.step = step
        self.batches = doublings(1, step.rows)
        self.windows = doublings(256, step.positions)
        self.pool = torch.cuda.graph_pool_handle()
        self.recordings = {
            (count, window): self._record(count, window)
            for count in reversed(self.batches)  # the largest first: the others fit into its memory
            for window in reversed(self.windows)
        }

    def width(self, count: int) -> int:
        """The rows that a batch of `count` is filled up to."""
        return next((batch for batch in self.batches if batch >= count), count)

    def run(self, end: int, *batch: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The outputs for batch tensors of `width` rows that read at least positions 0..end-1; None without a graph."""
        window = next((window for window in self.windows if window >= end), None)
        recording = self.recordings.get((len(batch[0]), window))
        if recording is None:
            return None
        for buffer, tensor in zip(recording.batch, batch, strict=True):
            buffer.copy_(tensor)
        recording.graph.replay()
        return recording.outputs

    def _record(self, count: int, window: int) -> Recording:
        step = self.step
        batch = tuple(tensor.clone() for tensor in step.example(count))
        places = torch.zeros(window, dtype=torch.int64, device=batch[0].device)

        def run() -> tuple[torch.Tensor, ...]:
            return step.function(step.network, *batch, places, *step.memory)

        beside = torch.cuda.Stream(batch[0].device)
        beside.wait_stream(torch.cuda.current_stream(batch[0].device))
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                eager = [tensor.clone() for tensor in run()]
        torch.cuda.current_stream(batch[0].device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = run()
        graph.replay()
        if difference := compare(outputs, eager):
            raise GraphRefused(f"at batch {count} and window {window} {difference}")
        return Recording(graph, batch, outputs)


def doublings(first: int, last: int) -> list[int]:
    """first, 2 * first, 4 * first, ... and `last` itself."""
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
