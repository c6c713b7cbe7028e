"""The output path: from a step's emissions to payloads on their connectors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from omni_lab.core import Payload
from omni_lab.engine.blocks import Block, gather, scatter
from omni_lab.engine.clock import IDLE, PAYLOAD, SEND, SLOT, PhaseTimer
from omni_lab.engine.stage import Emission


class Handoff(Protocol):
    """Decides when emissions become a payload (see pipeline/handoff.py): the step loop asks with `count`, in order.

    `streams` are those that have begun and not ended.
    """

    streams: dict

    def count(self, emission: Emission) -> int | None: ...

    def push(self, emission: Emission, produced_ns: int) -> Payload | None: ...

    def drop(self, request_id: str) -> None: ...


Send = Callable[[list[tuple[Emission, Payload]]], None]
"""Takes all payloads of a step, each with the emission that completed it."""

Fail = Callable[[list[Emission], Exception], None]
"""Ends the requests of these emissions, whose payloads could not be built or sent."""


Kept = tuple[list[Block], list[Emission], int]
"""What is left of a step for the output path: copies of its tensors, its emissions, when they were produced."""


def snapshot(handoff: Handoff, emissions: list[Emission], produced_ns: int) -> Kept:
    """Mark the emissions that complete a payload, and copy their tensors before a later step overwrites them."""
    for emission in emissions:
        emission.due = handoff.count(emission)
    return gather(emissions), emissions, produced_ns


class SyncOutput:
    """Payloads are built and sent between two steps: the next one starts when the last byte is out.

    The rows of a chunk that is still filling are copies too: a captured step overwrites its buffers. `timer` is that of
    the thread in which this happens.
    """

    def __init__(self, handoff: Handoff, send: Send, fail: Fail, timer: PhaseTimer) -> None:
        self.handoff = handoff
        self.send = send
        self.fail = fail
        self.timer = timer
        self.counters: dict[str, int] = {}

    def emit(self, emissions: list[Emission], produced_ns: int) -> None:
        self.build(*snapshot(self.handoff, emissions, produced_ns))

    def build(self, blocks: list[Block], emissions: list[Emission], produced_ns: int) -> None:
        """Send the payloads that these emissions, whose tensors are in the blocks, complete."""
        try:
            scatter(blocks, emissions)
            emissions = [emission for emission in emissions if not emission.sequence.aborted]
            pushed = [(emission, self.handoff.push(emission, produced_ns)) for emission in emissions]
            if payloads := [(emission, payload) for emission, payload in pushed if payload is not None]:
                self.timer.enter(SEND)
                self.send(payloads)
        except Exception as error:
            self.fail(emissions, error)

    def drop(self, request_id: str) -> None:
        """Forget what an aborted request has emitted and not sent."""
        self.handoff.drop(request_id)

    def drain(self) -> None:
        """Nothing is ever left to send."""

    def close(self) -> None:
        """Nothing to let go of."""


KEPT = 8
"""Steps that wait for the builder at most while no payload is due."""

Job = list[Callable[[], None]]
"""What the builder does in one go."""


class AsyncOutput:
    """A snapshot is taken inside the step; one persistent builder thread builds and sends beside the next.

    The builder is woken when a payload is due (or KEPT steps have come together): it takes Python's lock from the step
    loop. The order of emissions is kept. At most `depth` jobs wait for the builder; beyond that the step loop
    waits, so a slow target slows its source instead of filling the memory. `timer` is the step loop's; the builder has
    one of its own and counts what it did beside the steps.
    """

    def __init__(self, handoff: Handoff, send: Send, fail: Fail, timer: PhaseTimer, depth: int = 8) -> None:
        self.timer = timer
        self.beside = PhaseTimer()
        self.inside = SyncOutput(handoff, send, fail, self.beside)
        self.kept: list[Kept] = []
        self.jobs: queue.Queue[Job | None] = queue.Queue(depth)
        self.thread = threading.Thread(target=self._build, name="output-builder", daemon=True)
        self.thread.start()

    def emit(self, emissions: list[Emission], produced_ns: int) -> None:
        if not emissions:
            return
        self.kept.append(snapshot(self.inside.handoff, emissions, produced_ns))
        if len(self.kept) == KEPT or any(emission.due is not None for emission in emissions):
            self._flush()

    @property
    def counters(self) -> dict[str, int]:
        return {"beside_ns": self.beside.totals[PAYLOAD] + self.beside.totals[SEND]}

    def drop(self, request_id: str) -> None:
        self._flush(partial(self.inside.drop, request_id))

    def drain(self) -> None:
        """Wait until every payload that is due is sent."""
        self.jobs.join()

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join(timeout=10.0)

    def _flush(self, *then: Callable[[], None]) -> None:
        steps = [partial(self.inside.build, *kept) for kept in self.kept]
        self.kept = []
        self._put([*steps, *then])

    def _put(self, job: Job) -> None:
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            phase = self.timer.phase
            self.timer.enter(SLOT)
            self.jobs.put(job)
            self.timer.enter(phase)

    def _build(self) -> None:
        while (job := self.jobs.get()) is not None:
            for task in job:
                self.beside.enter(PAYLOAD)
                task()
            self.beside.enter(IDLE)
            self.jobs.task_done()
