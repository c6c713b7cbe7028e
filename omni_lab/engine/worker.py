"""One stage at work: inbox -> scheduler -> step -> output path."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from omni_lab.connectors.shared_memory import ChannelClosed, ChannelFull
from omni_lab.connectors.wire import (
    Abort,
    Admit,
    Finish,
    Hold,
    Message,
    Ping,
    Records,
    Shutdown,
    StartCapture,
    StopCapture,
    TakeRecords,
)
from omni_lab.core import CLIENT, Payload, PipelineError
from omni_lab.engine.clock import IDLE, INPUT, OTHER, SCHEDULE, PhaseTimer, StepClock
from omni_lab.engine.output import AsyncOutput, Fail, Handoff, Send, SyncOutput
from omni_lab.engine.scheduler import ContinuousBatching, LeastServedBatching
from omni_lab.engine.stage import Emission, Sequence, Stage
from omni_lab.tracing.window import WorkerCapture

CHUNKS_KEPT = 1 << 17
"""Rows about received payloads that are kept until they are asked for; older ones are dropped and counted."""

RECORDS_SENT = 1 << 14
"""Rows in one message to the client."""


class Channel(Protocol):
    """One end of an edge; a channel has only one of the two directions."""

    def send(self, *messages: Message) -> None: ...

    def receive(self) -> list[Message]: ...


class InputError(Exception):
    """A stage could not take the input of `sequence`, and found out only when it was asked for the next step."""

    def __init__(self, sequence: Sequence, cause: str) -> None:
        super().__init__(cause)
        self.sequence = sequence


class Worker:
    """Runs one replica of one stage. `turn` is the whole loop; who calls it and how it waits is the executor's.

    `inboxes` are the receiving ends by source, the client's first; `outboxes` the sending ends by
    (target, replica). `unpack` gives a payload of another stage its tensors back (pipeline/packing.py); `end` ends what
    the stage keeps outside the worker.
    """

    def __init__(
        self,
        stage: Stage,
        replica: int,
        scheduler: ContinuousBatching | LeastServedBatching,
        handoff: Handoff,
        output: Callable[[Handoff, Send, Fail, PhaseTimer], SyncOutput | AsyncOutput],
        clock: StepClock,
        inboxes: dict[str, Channel],
        outboxes: dict[tuple[str, int], Channel],
        facts: dict[str, int],
        unpack: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self.replica = replica
        self.scheduler = scheduler
        self.handoff = handoff
        self.output = output(handoff, self._send, self._lose, clock)
        self.clock = clock
        self.inboxes = inboxes
        self.outboxes = outboxes
        self.facts = facts
        self.unpack = unpack
        self.end = end
        self.sequences: dict[str, Sequence] = {}
        self.chunks: deque[tuple] = deque(maxlen=CHUNKS_KEPT)
        self.counters = {"late_payloads": 0, "lost_chunks": 0}
        self.stopped = False
        self.capture = WorkerCapture(self, self.outboxes[CLIENT, 0].send)

    def turn(self) -> bool:
        """Take in what has arrived and take one step; False when there was nothing to step.

        Raises PipelineError if the stage itself is gone.
        """
        self.clock.enter(SCHEDULE)
        for message in self._receive():
            self._handle(message)
        try:
            scheduled = self.scheduler.schedule()
        except InputError as error:
            self._fail(error.sequence, error)
            self._leave(error.sequence)
            return True
        if scheduled is None:
            self.clock.rename(INPUT if self.sequences else IDLE)
            return False
        self._step(*scheduled)
        return True

    @torch.inference_mode()
    def _step(self, kind: str, batch: list[Sequence]) -> None:
        tokens = 0
        try:
            try:
                emissions, tokens = self.stage.step(kind, batch)
            finally:
                ended_ns = self.clock.record(self.stage.name, len(batch), tokens, kind)
            self.output.emit(emissions, ended_ns)
        except PipelineError:
            raise
        except Exception as error:  # a step serves many requests: all of them hear of it, the worker goes on
            for sequence in batch:
                self._fail(sequence, error)
        self.clock.enter(OTHER)
        for sequence in batch:
            sequence.steps += 1
            if sequence.finished:
                if sequence.aborted:  # its hand-off failed, perhaps with steps that the output path still keeps
                    self.output.drop(sequence.request_id)
                self._leave(sequence)

    def close(self) -> None:
        self.capture.close()
        self.output.close()
        self.end()

    def _receive(self) -> list[Message]:
        """Everything that has arrived, control first.

        The edges are read before the client's channel and handled after it: a request is admitted before its
        first payload is sent, so whatever an edge delivers, its admission is already there.
        """
        payloads = [
            message for source, inbox in self.inboxes.items() if source != CLIENT for message in inbox.receive()
        ]
        return self.inboxes[CLIENT].receive() + payloads

    def _handle(self, message: Message) -> None:
        match message:
            case Payload():
                self._accept(message)
            case Admit():
                sequence = Sequence(
                    message.request_id, message.sampling, message.options, message.targets, message.routes
                )
                self.sequences[message.request_id] = sequence
                self.stage.open(sequence)
                self.scheduler.add(sequence)
            case Abort(request_id):
                if sequence := self.sequences.get(request_id):
                    sequence.aborted = True
                    self._leave(sequence)
                    self.output.drop(request_id)
            case Hold(request_id, held):
                if sequence := self.sequences.get(request_id):
                    sequence.held = held
            case Ping():
                self.outboxes[CLIENT, 0].send(message)
            case Finish(request_id):
                if sequence := self.sequences.get(request_id):
                    sequence.sampling = dataclasses.replace(sequence.sampling, max_tokens=0)
            case TakeRecords():
                self.output.drain()
                self.outboxes[CLIENT, 0].send(*self.records())
            case StartCapture():
                self.clock.enter(IDLE)  # loading the profiler and writing a trace is no work of the stage
                self.outboxes[CLIENT, 0].send(self.capture.start(message))
                self.clock.enter(SCHEDULE)
            case StopCapture():
                self.clock.enter(IDLE)
                self.outboxes[CLIENT, 0].send(self.capture.stop())
                self.clock.enter(SCHEDULE)
            case Shutdown():
                self.stopped = True

    def _accept(self, payload: Payload) -> None:
        edge = f"{payload.source}->{payload.target}"
        if payload.source != CLIENT:
            payload.tensors = self.unpack(payload.tensors)
        rows = next((len(tensor) for tensor in payload.tensors.values() if tensor.ndim), 0)
        self.counters["lost_chunks"] += len(self.chunks) == CHUNKS_KEPT
        times = (payload.produced_ns, payload.sent_ns, payload.received_ns)
        self.chunks.append((edge, payload.request_id, payload.index, rows, payload.nbytes, *times, payload.final))
        sequence = self.sequences.get(payload.request_id)
        if sequence is None:  # it was aborted, or it finished before its input did
            self.counters["late_payloads"] += 1
            return
        try:
            self.stage.receive(sequence, payload)
        except Exception as error:
            self._fail(sequence, error)
            self._leave(sequence)

    def records(self) -> Iterator[Records]:
        """Steps, received payloads and counters since the last call, in messages of at most RECORDS_SENT rows."""
        steps, lost = self.clock.take()
        chunks = list(self.chunks)
        self.chunks.clear()
        counters = self.counters | self.stage.counters | self.output.counters
        counters |= {"open_sequences": len(self.sequences), "open_streams": len(self.handoff.streams)}
        counters |= {"peak_rss_bytes": peak_rss_bytes()}
        ends = range(RECORDS_SENT, max(len(steps), len(chunks), 1) + RECORDS_SENT, RECORDS_SENT)
        for end in ends:
            part = slice(end - RECORDS_SENT, end)
            last = end == ends[-1]
            yield Records(self.stage.name, self.replica, steps[part], chunks[part], lost * last, counters, last)

    def _send(self, payloads: list[tuple[Emission, Payload]]) -> None:
        """Called by the output path, from its thread: payloads of one step, one send for each outbox.

        A hand-off that fails ends its requests, with the cause.
        """
        outboxes: dict[tuple[str, int], list[tuple[Emission, Payload]]] = {}
        for emission, payload in payloads:
            replica = 0 if payload.target == CLIENT else emission.sequence.routes[payload.target]
            outboxes.setdefault((payload.target, replica), []).append((emission, payload))
        for outbox, sent in outboxes.items():
            try:
                self.outboxes[outbox].send(*(payload for _, payload in sent))
            except (ChannelFull, ChannelClosed) as error:
                self._lose([emission for emission, _ in sent], error)

    def _lose(self, emissions: list[Emission], error: Exception) -> None:
        """Called by the output path, from its thread: these could not be handed over, so their requests end."""
        for emission in emissions:
            sequence = emission.sequence
            if sequence.aborted:
                continue
            sequence.finished = sequence.aborted = True
            self.handoff.drop(sequence.request_id)
            named = error if isinstance(error, ChannelFull | ChannelClosed) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(ChannelFull, ChannelClosed):  # the client takes nothing: there is nobody to tell
                self._report(sequence.request_id, f"hand-off {self.stage.name}->{emission.target} failed: {named}")

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        sequence.finished = True
        self.output.drop(sequence.request_id)
        self._report(sequence.request_id, f"{type(error).__name__}: {error}")

    def _report(self, request_id: str, cause: str) -> None:
        error = f"stage {self.stage.name}, replica {self.replica}, request {request_id}: {cause}"
        self.outboxes[CLIENT, 0].send(Payload(request_id, self.stage.name, CLIENT, final=True, error=error))

    def _leave(self, sequence: Sequence) -> None:
        if self.sequences.pop(sequence.request_id, None):
            self.scheduler.remove(sequence)
            self.stage.close(sequence)


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far, pages of shared libraries included.

    Linux's VmHWM begins with the program; getrusage, the way elsewhere, may still hold its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
