"""Captures of a running pipeline: which stages record, how far they are, what they wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_lab.connectors.wire import Captured, Capturing, Message, StartCapture, StopCapture
from omni_lab.tracing.profiler import PIECE, CaptureError
from omni_lab.tracing.worker_trace import trace_path

READY_S = 120.0
"""Time for all workers to get ready; the profiler's libraries take seconds, and a step must end first."""

WRITE_S = 300.0
"""Time for all workers to write their traces."""

Worker = tuple[str, int]


class Captures:
    """One capture at a time. `send` takes (stage, replica, message); `down` names the workers that do not run.

    `shared` says that all stages share one process and thread. Use it from the pipeline's loop.
    """

    def __init__(
        self,
        replicas: dict[str, int],
        down: dict[Worker, str],
        send: Callable[[str, int, Message], None],
        shared: bool,
    ) -> None:
        self.replicas = replicas
        self.down = down
        self.send = send
        self.shared = shared
        self.running: list[Worker] = []
        self.directory = Path()
        self.progress: dict[Worker, Capturing] = {}
        self.captured: dict[Worker, Captured] = {}
        self.heard: Callable[[Capturing], None] = lambda told: None
        self.news = asyncio.Event()
        self.gone = ""
        self.lost: dict[Worker, str] = {}

    async def start(
        self,
        directory: Path | str,
        stages: Sequence[str] | None = None,
        *,
        skip_steps: int = 0,
        steps: int = 30,
        stacks: bool = False,
        memory: bool = False,
        max_mb: float = 256.0,
        max_s: float = 60.0,
        heard: Callable[[Capturing], None] = lambda told: None,
    ) -> None:
        """Let every worker of `stages` (None: of all) record `steps` of its steps, after `skip_steps` others.

        A worker ends its window early `max_s` seconds after its first step, or once its process has recorded about
        `max_mb` MB of JSON, by the size of its steps so far. Returns when all are ready; `heard` is told how far each
        is. Raises CaptureError if a stage is unknown, a capture runs already, or a worker cannot capture.
        """
        if self.running:
            raise CaptureError("a capture runs already; stop it first")
        unknown = sorted(set(stages or ()) - set(self.replicas))
        if unknown:
            raise CaptureError(f"stages: expected some of {list(self.replicas)}, got {', '.join(unknown)}")
        if steps < 1 or skip_steps < 0 or max_mb <= 0 or max_s <= 0:
            raise CaptureError(
                "expected steps of at least 1, skip_steps of at least 0, max_mb and max_s above 0; "
                f"got {steps}, {skip_steps}, {max_mb}, {max_s}"
            )
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(f"expected a directory that can be made, got {directory} ({error.strerror})") from None
        chosen = [stage for stage in self.replicas if stages is None or stage in stages]
        self.running = [(stage, replica) for stage in chosen for replica in range(self.replicas[stage])]
        self.directory = Path(directory)
        self.progress, self.captured, self.heard = {}, {}, heard
        self.lost = {worker: self.down[worker] for worker in self.running if worker in self.down}
        for stage, replica in self.running:  # one that takes no step must not seem to have written an old trace
            trace_path(directory, f"{stage}_r{replica}").unlink(missing_ok=True)
        base_ns = time.time_ns() - time.monotonic_ns()
        where = str(Path(directory).absolute())
        order = StartCapture(where, skip_steps, steps, stacks, memory, max_mb, max_s, base_ns, self.shared)
        for stage, replica in self.running:
            self.send(stage, replica, order)
        try:
            silent = await self._wait(self.progress, READY_S)
        except asyncio.CancelledError:
            for stage, replica in self.running:
                self.send(stage, replica, StopCapture())
            self.running = []
            raise
        errors = [told.error for told in self.progress.values() if told.error]
        if silent or errors:
            await self.stop()
            raise CaptureError("; ".join([*errors, *silent]))

    async def stop(self) -> list[Captured]:
        """End the windows that are still open and write the traces: one answer for each worker, errors among them.

        Raises CaptureError if no capture runs.
        """
        if not self.running:
            raise CaptureError("no capture runs; start one first")
        self.captured = {}
        for stage, replica in self.running:
            self.send(stage, replica, StopCapture())
        silent = await self._wait(self.captured, WRITE_S)
        workers, self.running = self.running, []
        for piece in self.directory.glob(f"{PIECE}*"):  # of a worker that was killed
            piece.unlink(missing_ok=True)
        missing = iter(silent)
        return [self.captured.get(worker) or Captured(*worker, error=next(missing)) for worker in workers]

    @property
    def recorded_bytes(self) -> int:
        """Bytes of JSON recorded so far by all processes, as far as they know (see `Capturing`)."""
        known = [told.json_bytes or 0 for told in self.progress.values()]
        return max(known, default=0) if self.shared else sum(known)

    def hear(self, message: Capturing | Captured) -> None:
        """An answer of a worker, or news of its capture."""
        worker = (message.stage, message.replica)
        if isinstance(message, Captured):
            self.captured[worker] = message
        else:
            self.progress[worker] = message
            self.heard(message)
        self.news.set()

    def ended(self, worker: Worker, cause: str) -> None:
        """A worker has ended, and its capture with it: another that takes its place knows of none."""
        self.lost[worker] = cause
        self.news.set()

    def end(self, cause: str) -> None:
        """The pipeline is broken: nobody will answer."""
        self.gone = cause
        self.news.set()

    async def _wait(self, answers: dict[Worker, Message], seconds: float) -> list[str]:
        """Wait until every worker that runs has answered; a sentence for each that has not."""
        deadline = time.monotonic() + seconds
        while missing := [worker for worker in self.running if worker not in answers]:
            left = deadline - time.monotonic()
            if left <= 0 or self.gone or all(worker in self.lost for worker in missing):
                break
            self.news.clear()
            try:
                await asyncio.wait_for(self.news.wait(), left)
            except TimeoutError:
                continue
        late = self.gone or f"{seconds:.0f} s were too few"
        return [
            f"{stage}_r{replica}: no answer, because {self.lost.get((stage, replica), late)}"
            for stage, replica in missing
        ]
