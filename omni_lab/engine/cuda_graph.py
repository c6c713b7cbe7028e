"""Captured steps on CUDA: the eager step recorded once for each bucket of (batch, window) and replayed.

A vocoder's pass likewise, for each bucket of (rows, frames). Not verified on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from omni_lab.engine.compiled import GraphRefused, compare
from omni_lab.engine.traced import TracedPass, TracedStep

WARM_UP = 3
"""Eager runs before a recording: libraries set up their workspaces in the first ones."""

BUCKETS = 32
"""The most recordings of a vocoder's pass, the smallest shapes first: each holds its inputs and outputs for good."""
SHORTEST, LONGEST = 4, 128
"""Frames of the smallest and the largest bucket of a vocoder's pass; a longer one computes enough to run eager."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One CUDA graph with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    def replay(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The outputs for batch tensors, until the next replay."""
        for buffer, tensor in zip(self.batch, batch, strict=True):
            buffer.copy_(tensor)
        self.graph.replay()
        return self.outputs


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
        return None if recording is None else recording.replay(batch)

    def _record(self, count: int, window: int) -> Recording:
        step = self.step
        batch = tuple(tensor.clone() for tensor in step.example(count))
        places = torch.zeros(window, dtype=torch.int64, device=batch[0].device)

        def run() -> tuple[torch.Tensor, ...]:
            return step.function(step.network, *batch, places, *step.memory)

        return record(run, batch, self.pool, f"batch {count} and window {window}")


class CudaPasses:
    """The graphs of one pass, for (rows, frames) of `buckets`; all are recorded and compared before there is traffic.

    Outputs are overwritten by the next replay of the same bucket. Raises GraphRefused if a recording computes
    something else than the eager pass.
    """

    def __init__(self, traced: TracedPass) -> None:
        self.traced = traced
        self.shapes = buckets(traced.rows, min(traced.frames, LONGEST))
        self.pool = torch.cuda.graph_pool_handle()
        self.recordings = {shape: self._record(*shape) for shape in reversed(self.shapes)}

    def shape(self, rows: int, frames: int) -> tuple[int, int] | None:
        """The smallest bucket that holds a pass of this shape, to be filled up to; None if there is none."""
        return next((bucket for bucket in self.shapes if bucket[0] >= rows and bucket[1] >= frames), None)

    def run(self, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs for batch tensors of a `shape`."""
        return self.recordings[len(batch[0]), batch[0].shape[-1]].replay(batch)

    def _record(self, rows: int, frames: int) -> Recording:
        traced = self.traced
        batch = tuple(tensor.clone() for tensor in traced.example(rows, frames))
        run = partial(traced.function, traced.network, *batch)
        return record(run, batch, self.pool, f"{rows} rows of {frames} frames")


def record(
    run: Callable[[], tuple[torch.Tensor, ...]], batch: tuple[torch.Tensor, ...], pool: Any, shape: str
) -> Recording:
    """A recording of `run`, which reads the buffers `batch`. Raises GraphRefused if a replay gives something else."""
    device = batch[0].device
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            eager = [tensor.clone() for tensor in run()]
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = run()
    graph.replay()
    if difference := compare(outputs, eager):
        raise GraphRefused(f"at {shape} {difference}")
    return Recording(graph, batch, outputs)


def buckets(rows: int, frames: int) -> list[tuple[int, int]]:
    """Shapes (rows, frames) in doublings, up to `rows` and `frames`, by their size: the `BUCKETS` smallest."""
    shapes = product(doublings(1, rows), doublings(SHORTEST, frames))
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))[:BUCKETS]


def doublings(first: int, last: int) -> list[int]:
    """first, 2 * first, 4 * first, ... and `last` itself."""
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
