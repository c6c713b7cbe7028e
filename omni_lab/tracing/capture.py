"""Capturing a running pipeline: `async with capture(pipeline, stages=["talker"], steps=30) as traces`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from omni_lab.connectors.wire import Captured
from omni_lab.metrics.records import RequestRow
from omni_lab.pipeline.collector import Measured
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.tracing.merge import merge_traces

MERGED = "merged.json.gz"


@dataclass(slots=True)
class Traces:
    """What a capture wrote. `workers` has an answer of each worker, also of those without a trace: `error` says why.

    `measured` holds the records that were taken to draw the merged trace; a later `take_records` has only newer ones.
    """

    directory: Path
    workers: list[Captured] = field(default_factory=list)
    merged: Path | None = None
    measured: Measured = field(default_factory=Measured)

    @property
    def paths(self) -> list[Path]:
        """The traces of the workers."""
        return [Path(worker.path) for worker in self.workers if worker.path]

    @property
    def errors(self) -> list[str]:
        return [worker.error for worker in self.workers if worker.error]

    def record(self, relative_to: Path) -> dict[str, Any]:
        """For run.json: each worker's facts, paths relative to the run."""

        def shown(path: str | Path | None) -> str | None:
            return str(Path(path).absolute().relative_to(relative_to.absolute())) if path else None

        workers = [msgspec.structs.asdict(worker) | {"path": shown(worker.path)} for worker in self.workers]
        return {"merged": shown(self.merged), "workers": workers}


@asynccontextmanager
async def capture(
    pipeline: Pipeline,
    directory: Path | str = "traces",
    stages: Sequence[str] | None = None,
    *,
    requests: Iterable[RequestRow] = (),
    **options: Any,
) -> AsyncIterator[Traces]:
    """Records steps of each worker of `stages` while the block runs; the traces are there after it.

    `options` are those of `Captures.start`: steps, skip_steps, max_mb and so on. `requests` is read at the end. Raises
    CaptureError if the capture cannot start; a worker that took no step is no error: see `Traces.errors`.
    """
    traces = Traces(Path(directory))
    (traces.directory / MERGED).unlink(missing_ok=True)
    await pipeline.captures.start(directory, stages, **options)
    try:
        yield traces
    finally:
        traces.workers = await pipeline.captures.stop()
    traces.measured = await pipeline.take_records()
    if traces.paths:
        traces.merged = traces.directory / MERGED
        merge_traces(traces.merged, traces.paths, traces.measured.steps, traces.measured.chunks, requests)
