"""What the workers of a pipeline measured: collected as it comes in, handed out as one."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_lab.connectors.wire import Records
from omni_lab.core import CLIENT, Payload
from omni_lab.engine.worker import CHUNKS_KEPT
from omni_lab.metrics.records import ChunkRow, StepRow

Replica = tuple[str, int]
"""A worker: its stage and its number."""


@dataclass(slots=True)
class Measured:
    """What the workers recorded since the last call: steps, chunks on all edges, steps lost, counters by worker."""

    steps: list[StepRow] = field(default_factory=list)
    chunks: list[ChunkRow] = field(default_factory=list)
    lost_steps: int = 0
    counters: dict[str, dict[str, int]] = field(default_factory=dict)


class Collector:
    """Rows are kept from the moment they arrive: an answer that comes late belongs to the next `Measured`."""

    def __init__(self) -> None:
        self.measured = Measured()
        self.chunks: deque[ChunkRow] = deque(maxlen=CHUNKS_KEPT)
        self.gone: dict[Replica, Counter] = {}
        self.asked: set[Replica] = set()
        self.answered = asyncio.Event()
        self.turn = asyncio.Lock()

    async def take(self, workers: set[Replica], ask: Callable[[str, int], None]) -> Measured:
        """Ask these workers and wait until each has answered or is gone: what was measured since the last call."""
        async with self.turn:
            self.asked = set(workers)
            for worker in workers:
                ask(*worker)
            while self.asked:
                self.answered.clear()
                await self.answered.wait()
            measured, self.measured = self.measured, Measured()
        measured.chunks += self.chunks
        self.chunks.clear()
        for (stage, replica), counts in self.gone.items():
            measured.counters.setdefault(f"{stage}_r{replica}", {}).update(counts)
        return measured

    def add(self, records: Records) -> None:
        """A part of a worker's answer."""
        self.measured.lost_steps += records.lost
        self.measured.counters[f"{records.stage}_r{records.replica}"] = records.counters
        self.measured.chunks += [ChunkRow(edge, plain(name), *rest) for edge, name, *rest in records.chunks]
        self.measured.steps += [StepRow(row[0], records.replica, *row[1:]) for row in records.steps]
        if records.last:
            self.skip({(records.stage, records.replica)})

    def delivered(self, payload: Payload) -> None:
        """Audio has reached the client."""
        times = (payload.produced_ns, payload.sent_ns, payload.received_ns)
        edge, frames = f"{payload.source}->{CLIENT}", int(payload.tensors["frames"])
        name = plain(payload.request_id)
        self.chunks.append(ChunkRow(edge, name, payload.index, frames, payload.nbytes, *times, payload.final))

    def ended(self, worker: Replica, lost: int) -> None:
        """A worker's process has ended, and `lost` payloads with it: it answers no more."""
        self.gone.setdefault(worker, Counter()).update(deaths=1, lost_payloads=lost)
        self.skip({worker})

    def missed(self, worker: Replica, lost: int) -> None:
        """`lost` payloads came for a worker while it was gone."""
        self.gone[worker]["lost_payloads"] += lost

    def skip(self, workers: set[Replica]) -> None:
        """These workers have answered, or never will."""
        self.asked -= workers
        self.answered.set()


def plain(name: str) -> str:
    """A request's own id."""
    return name.rpartition("#")[0]
