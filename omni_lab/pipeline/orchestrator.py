"""The orchestrator: admits requests to the stage graph and gives their outputs to the clients, event by event."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from omni_lab.connectors.shared_memory import ChannelFull
from omni_lab.connectors.wire import Abort, Admit, Message, Records, TakeRecords
from omni_lab.core import (
    CLIENT,
    AudioChunk,
    Event,
    Finished,
    Payload,
    PipelineError,
    PipelineSpec,
    Prompt,
    Request,
    RequestError,
    Sampling,
    StageError,
    TextDelta,
)
from omni_lab.engine.worker import CHUNKS_KEPT
from omni_lab.metrics.records import ChunkRow, StepRow
from omni_lab.pipeline.validate import check_request

STALL_S = 600.0
"""A request fails when no stage has sent anything to anybody for this long: nothing waits for ever."""


class TextDecoder(Protocol):
    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class FrontEnd(Protocol):
    """Turns a request into a prompt and token ids into text (see models/<family>/prompt.py)."""

    def prepare(self, request: Request, max_prompt_tokens: int) -> Prompt: ...

    def text_decoder(self) -> TextDecoder: ...


class Executor(Protocol):
    """Runs the workers of all stages (see pipeline/inline.py and pipeline/process.py)."""

    async def start(self, deliver: Callable[[Message], None], broken: Callable[[str], None]) -> None: ...

    def send(self, stage: str, replica: int, message: Message) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Measured:
    """What the workers recorded since the last call: steps, chunks on all edges, steps lost, counters by worker."""

    steps: list[StepRow] = field(default_factory=list)
    chunks: list[ChunkRow] = field(default_factory=list)
    lost_steps: int = 0
    counters: dict[str, dict[str, int]] = field(default_factory=dict)


class Pipeline:
    """A running stage graph. Use it from one asyncio loop; `open_pipeline` in assemble.py makes it.

    Inside, a request goes by its id and a number of its own: a client may use an id again while payloads of the
    request that had it before are still on their way.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        replicas: dict[str, int],
        max_lengths: dict[str, int],
        prompt_limit: int,
        front_end: FrontEnd,
        executor: Executor,
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        self.max_lengths = max_lengths
        self.prompt_limit = prompt_limit
        self.front_end = front_end
        self.executor = executor
        self.effective: dict = {}
        self.requests: dict[str, asyncio.Queue[Payload | str]] = {}
        self.names: dict[str, str] = {}
        self.numbers = itertools.count()
        self.load = {(stage, replica): 0 for stage, count in replicas.items() for replica in range(count)}
        self.chunks: deque[ChunkRow] = deque(maxlen=CHUNKS_KEPT)
        self.records: asyncio.Queue[Records] = asyncio.Queue()
        self.broken: str | None = None
        self.heard = time.monotonic()

    async def start(self) -> None:
        await self.executor.start(self._deliver, self._break)

    async def close(self) -> None:
        """End all workers. Requests that are still at work end with a PipelineError."""
        self._break("the pipeline is closed")
        await self.executor.close()

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Events of the answer as they arrive, `Finished` last.

        Raises RequestError if the request cannot be served as it is, StageError if a stage failed on it. Closing
        the iterator early, or cancelling its task, aborts the request in every stage.
        """
        if self.broken:
            raise PipelineError(self.broken)
        offered = {modality for stage in self.spec.stages for modality in stage.modalities}
        check_request(request, list(self.max_lengths), offered)
        if request.id in self.names.values():
            raise RequestError(f"{request.id!r} is in use; give each request its own id", "id")
        stages = self.spec.needed(tuple(request.modalities))
        prompt = self.front_end.prepare(request, self.prompt_limit)
        self._check_lengths(request, prompt)
        routes = {stage: self._least_loaded(stage) for stage in stages}
        name = f"{request.id}#{next(self.numbers)}"
        events: asyncio.Queue[Payload | str] = asyncio.Queue()
        self.requests[name] = events
        self.names[name] = request.id
        for route in routes.items():
            self.load[route] += 1
        try:
            for stage in reversed(stages):  # the last first: a stage is ready before anything can be handed to it
                targets = tuple(t for t in self.spec.outputs(stage) if t in stages or self._wanted(stage, t, request))
                sampling = request.sampling.get(stage, Sampling())
                options = prompt.options.get(stage, {}) | {"return_codes": request.return_codes}
                self.executor.send(stage, routes[stage], Admit(name, sampling, options, targets, routes))
            first = Payload(name, CLIENT, stages[0], final=True, tensors=prompt.tensors)
            first.produced_ns = time.monotonic_ns()
            self.executor.send(stages[0], routes[stages[0]], first)
            async for event in self._events(request, prompt, events):
                yield event
        except ChannelFull as error:
            raise RequestError(f"{error}; send less media", "messages") from None
        finally:
            del self.requests[name], self.names[name]
            for route in routes.items():
                self.load[route] -= 1
            if not self.broken:  # a stage whose part is done ignores this; one still at work stops
                for stage, replica in routes.items():
                    self.executor.send(stage, replica, Abort(name))

    async def take_records(self) -> Measured:
        """What was measured since the last call."""
        workers = list(self.load)
        for stage, replica in workers:
            self.executor.send(stage, replica, TakeRecords())
        measured = Measured(chunks=list(self.chunks))
        self.chunks.clear()
        last = 0
        while last < len(workers):
            records = await self._or_broken(self.records.get())
            last += records.last
            measured.lost_steps += records.lost
            measured.counters[f"{records.stage}_r{records.replica}"] = records.counters
            measured.chunks += [ChunkRow(edge, plain(name), *rest) for edge, name, *rest in records.chunks]
            measured.steps += [StepRow(row[0], records.replica, *row[1:]) for row in records.steps]
        return measured

    async def _events(self, request: Request, prompt: Prompt, events: asyncio.Queue) -> AsyncIterator[Event]:
        decoder = self.front_end.text_decoder()
        waiting_for = set(request.modalities)
        reasons: dict[str, str] = {}
        text = ""
        while waiting_for:
            payload = await self._next(request, events, waiting_for)
            if isinstance(payload, str):
                raise PipelineError(payload)
            if payload.error:
                raise StageError(payload.error.replace(payload.request_id, request.id))
            modality = "audio" if "audio" in payload.tensors else "text"
            if modality == "text":
                token_ids = payload.tensors["token_ids"].tolist()
                delta = decoder.push(token_ids) + (decoder.finish() if payload.final else "")
                text += delta
                yield TextDelta(delta, token_ids, payload.received_ns)
            else:
                yield audio_chunk(payload)
            if payload.final:
                waiting_for.discard(modality)
                reasons[modality] = payload.finish_reason or "stop"
        yield Finished(reasons, prompt.tokens, text, payload.received_ns)

    async def _next(self, request: Request, events: asyncio.Queue, waiting_for: set[str]) -> Payload | str:
        """The request's next message. It may queue behind others for long, but not behind silence."""
        while True:
            try:
                async with asyncio.timeout(STALL_S):
                    return await events.get()
            except TimeoutError:
                if time.monotonic() - self.heard >= STALL_S:
                    missing = " and ".join(sorted(waiting_for))
                    raise StageError(
                        f"request {request.id}: no stage sent anything for {STALL_S:.0f} s; still waiting for {missing}"
                    ) from None

    def _wanted(self, stage: str, target: str, request: Request) -> bool:
        return target == CLIENT and bool(set(self.spec.stage(stage).modalities) & set(request.modalities))

    def _check_lengths(self, request: Request, prompt: Prompt) -> None:
        """A stage holds a sequence of at most `max_model_len`: prompt and answer must fit before anything starts."""
        for stage, length in prompt.lengths.items():
            limit, answer = self.max_lengths[stage], request.sampling.get(stage, Sampling()).max_tokens
            if length + answer > limit:
                raise RequestError(
                    f"a prompt of {length} tokens and max_tokens {answer} do not fit into the {limit} of "
                    f"stages.{stage}.max_model_len; shorten the prompt or lower max_tokens",
                    f"{stage} prompt",
                )

    def _least_loaded(self, stage: str) -> int:
        return min(range(self.replicas[stage]), key=lambda replica: self.load[stage, replica])

    def _deliver(self, message: Message) -> None:
        """A message from a worker."""
        self.heard = time.monotonic()
        if isinstance(message, Records):
            self.records.put_nowait(message)
        elif isinstance(message, Payload):
            if "audio" in message.tensors:
                self.chunks.append(client_chunk(message))
            if message.request_id in self.requests:
                self.requests[message.request_id].put_nowait(message)

    def _break(self, cause: str) -> None:
        """A worker is gone: every request hears of it, and so does every later one."""
        self.broken = self.broken or cause
        for events in self.requests.values():
            events.put_nowait(self.broken)

    async def _or_broken(self, wait: Awaitable[Records]) -> Records:
        task = asyncio.ensure_future(wait)
        while not task.done():
            if self.broken:
                task.cancel()
                raise PipelineError(self.broken)
            await asyncio.wait({task}, timeout=0.5)
        return task.result()


def audio_chunk(payload: Payload) -> AudioChunk:
    codes = payload.tensors.get("codes")
    return AudioChunk(
        payload.tensors["audio"].numpy(),
        payload.index,
        int(payload.tensors["frames"]),
        payload.final,
        payload.produced_ns,
        payload.sent_ns,
        payload.received_ns,
        None if codes is None else codes.numpy(),
    )


def plain(name: str) -> str:
    """A request's own id."""
    return name.rpartition("#")[0]


def client_chunk(payload: Payload) -> ChunkRow:
    return ChunkRow(
        f"{payload.source}->{CLIENT}",
        plain(payload.request_id),
        payload.index,
        int(payload.tensors["frames"]),
        payload.nbytes,
        payload.produced_ns,
        payload.sent_ns,
        payload.received_ns,
        payload.final,
    )
