"""The orchestrator: admits requests to the stage graph and gives their outputs to the clients, event by event."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from omni_lab.connectors.shared_memory import MessageTooLarge
from omni_lab.connectors.wire import (
    Abort,
    Admit,
    Broken,
    Captured,
    Capturing,
    Finish,
    Hold,
    Message,
    Ready,
    Records,
    TakeRecords,
)
from omni_lab.core import (
    CLIENT,
    AudioChunk,
    DeadlineError,
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
    Unavailable,
)
from omni_lab.pipeline.captures import Captures
from omni_lab.pipeline.collector import Collector, Measured
from omni_lab.pipeline.flight import Flight
from omni_lab.pipeline.stop import StopText
from omni_lab.pipeline.validate import check_request

STALL_S = 600.0
"""A request fails when no stage has sent anything to anybody for this long: nothing waits for ever."""

READER_S = 60.0
"""A request whose stages are held for its client fails when the client takes nothing for this long."""


class TextDecoder(Protocol):
    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class FrontEnd(Protocol):
    """Turns a request into a prompt and token ids into text (see models/<family>/prompt.py)."""

    def prepare(self, request: Request, max_prompt_tokens: int) -> Prompt: ...

    def text_decoder(self) -> TextDecoder: ...


class Executor(Protocol):
    """Runs the workers of all stages (see pipeline/inline.py and pipeline/process.py).

    `deliver` also hears `Broken` when a worker has ended and `Ready` when another has taken its place; `broken` hears
    when there is no going on. `shared` says that all workers share the client's process and thread.
    """

    shared: bool

    async def start(self, deliver: Callable[[Message], None], broken: Callable[[str], None]) -> None: ...

    def send(self, stage: str, replica: int, message: Message) -> None: ...

    async def close(self) -> None: ...


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
        self.requests: dict[str, Flight] = {}
        self.numbers = itertools.count()
        self.load = {(stage, replica): 0 for stage, count in replicas.items() for replica in range(count)}
        self.down = dict.fromkeys(self.load, "it has not started")
        self.closing = False
        self.collector = Collector()
        self.captures = Captures(replicas, self.down, executor.send, executor.shared)
        self.broken: str | None = None
        self.heard = time.monotonic()
        self.watch: asyncio.Task | None = None

    async def start(self) -> None:
        await self.executor.start(self._deliver, self._break)
        self.down.clear()
        self.watch = asyncio.create_task(self._watch())

    async def close(self, drain_s: float = 0.0) -> None:
        """End all workers. New requests are refused at once; those at work have `drain_s` seconds to finish.

        Requests that are still at work then end with a PipelineError.
        """
        self.closing = True
        deadline = time.monotonic() + drain_s
        while self.requests and not self.broken and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._break("the pipeline is closed")
        if self.watch:
            self.watch.cancel()
        await self.executor.close()

    @property
    def unready(self) -> str | None:
        """Why no request for every modality can be served now; None when each stage has a worker that answers."""
        if self.broken or self.closing:
            return self.broken or "the pipeline is closing"
        return next((cause for stage in self.replicas if (cause := self._missing(stage))), None)

    def prepare(self, request: Request) -> Prompt:
        """The prompt of a request. Media take long: call it in another thread and hand its result to `generate`.

        Raises RequestError if the request cannot be served as it is.
        """
        offered = {modality for stage in self.spec.stages for modality in stage.modalities}
        check_request(request, list(self.max_lengths), offered)
        return self.front_end.prepare(request, self.prompt_limit)

    async def generate(
        self,
        request: Request,
        prompt: Prompt | None = None,
        deadline_s: float | None = None,
        text_interval_s: float = 0.0,
    ) -> AsyncIterator[Event]:
        """Events of the answer as they arrive, `Finished` last. `prompt` is what `prepare` made of the request.

        Tokens that come within `text_interval_s` of the last text are one event; those in which a stop text is to be
        found are not held.

        Raises RequestError if the request cannot be served as it is, Unavailable if a stage has no worker for it now,
        StageError if a stage failed on it or its worker ended, or the client took nothing for READER_S seconds, and
        DeadlineError if it has not finished `deadline_s` seconds from now. Closing the iterator early, or cancelling
        its task, aborts the request in every stage.
        """
        if self.broken:
            raise PipelineError(self.broken)
        if self.closing:
            raise Unavailable("the pipeline is closing")
        prompt = prompt or self.prepare(request)
        if any(request.id == other.request_id for other in self.requests.values()):
            raise RequestError(f"{request.id!r} is in use; give each request its own id", "id")
        stages = self.spec.needed(tuple(request.modalities))
        self._check_lengths(request, prompt)
        routes = {stage: self._least_loaded(stage) for stage in stages}
        name = f"{request.id}#{next(self.numbers)}"
        interval_s = 0.0 if request.stop else text_interval_s
        flight = self.requests[name] = Flight(name, request.id, routes, interval_s)
        if deadline_s is not None:
            late = DeadlineError(f"request {request.id}: not finished within {deadline_s:g} s by {route_text(routes)}")
            self._fail_later(flight, "deadline", deadline_s, late)
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
            async for event in self._events(request, prompt, flight):
                yield event
        except MessageTooLarge as error:
            raise RequestError(f"{error}; send less media", "messages") from None
        finally:
            self._release(flight)

    async def take_records(self) -> Measured:
        """What was measured since the last call. A worker that is down, or ends meanwhile, has nothing to tell.

        Counters are those of the worker's process. To those of a worker that has ended before come how often (`deaths`)
        and the payloads that nobody read until the next one was there (`lost_payloads`).
        """
        if self.broken:
            raise PipelineError(self.broken)
        up = set(self.load) - set(self.down)
        measured = await self.collector.take(up, lambda *worker: self.executor.send(*worker, TakeRecords()))
        if self.broken:
            raise PipelineError(self.broken)
        return measured

    async def _events(self, request: Request, prompt: Prompt, flight: Flight) -> AsyncIterator[Event]:
        decoder = self.front_end.text_decoder()
        stop = StopText(request.stop)
        waiting_for = set(request.modalities)
        reasons: dict[str, str] = {}
        text = ""
        while waiting_for:
            payload = await flight.take()
            if flight.held:
                self._hold(flight, not flight.drained)
            modality = "audio" if "audio" in payload.tensors else "text"
            if modality == "text":
                if stop.found:  # tokens that were on their way
                    continue
                token_ids = payload.tensors["token_ids"].tolist()
                delta = decoder.push(token_ids) + (decoder.finish() if payload.final else "")
                delta = stop.push(delta, payload.final)
                text += delta
                if stop.found and not payload.final:
                    payload.final, payload.finish_reason = True, "stop"
                    finish = Finish(payload.request_id)
                    self.executor.send(payload.source, flight.routes[payload.source], finish)
                if "text" in request.modalities:
                    yield TextDelta(delta, token_ids, payload.received_ns)
            else:
                yield audio_chunk(payload)
            if payload.final and modality in waiting_for:
                waiting_for.discard(modality)
                reasons[modality] = payload.finish_reason or "stop"
        yield Finished(reasons, prompt.tokens, text, payload.received_ns)

    def _wanted(self, stage: str, target: str, request: Request) -> bool:
        """Whether the stage gives something to the client: what was asked for, or text to look for a stop text in."""
        wanted = {*request.modalities, *(["text"] if request.stop else [])}
        return target == CLIENT and bool(set(self.spec.stage(stage).modalities) & wanted)

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
        """Raises Unavailable if the stage has no worker now."""
        if cause := self._missing(stage):
            raise Unavailable(cause)
        up = (replica for replica in range(self.replicas[stage]) if (stage, replica) not in self.down)
        return min(up, key=lambda replica: self.load[stage, replica])

    def _missing(self, stage: str) -> str | None:
        """Why a stage has no worker that answers, if it has none."""
        causes = [self.down.get((stage, replica)) for replica in range(self.replicas[stage])]
        if None in causes:
            return None
        return f"stage {stage} has no worker: " + "; ".join(f"replica {n}: {cause}" for n, cause in enumerate(causes))

    def _deliver(self, message: Message) -> None:
        """A message from a worker, or about one."""
        match message:
            case Payload():
                self.heard = time.monotonic()
                self._receive(message)
            case Records():
                self.collector.add(message)
            case Capturing() | Captured():
                self.captures.hear(message)
            case Ready(stage, replica, _, lost):
                del self.down[stage, replica]
                self.collector.missed((stage, replica), lost)
            case Broken(stage, replica, error, lost):
                self.down[stage, replica] = error
                self.collector.ended((stage, replica), lost)
                self.captures.ended((stage, replica), error)
                for flight in list(self.requests.values()):
                    if flight.routes.get(stage) == replica:
                        cause = f"stage {stage}, replica {replica}, request {flight.request_id}: {error}"
                        self._fail(flight, StageError(cause))

    def _receive(self, payload: Payload) -> None:
        if "audio" in payload.tensors:
            self.collector.delivered(payload)
        flight = self.requests.get(payload.request_id)
        if flight is None:
            return
        if payload.error:
            self._fail(flight, StageError(payload.error.replace(flight.name, flight.request_id)))
            return
        flight.put(payload)
        if flight.full and not flight.held:
            self._hold(flight, True)

    def _hold(self, flight: Flight, held: bool) -> None:
        """Hold the request in its stages, or let it go on, and give its client READER_S seconds from now.

        Only stages that own no cache row are held: a client that reads slowly must not keep others from one.
        """
        if held:
            cause = f"its client took nothing for {READER_S:g} s of what came from {route_text(flight.routes)}"
            self._fail_later(flight, "reader", READER_S, StageError(f"request {flight.request_id}: {cause}"))
        else:
            flight.timers.pop("reader").cancel()
        if held != flight.held:
            flight.held = held
            for stage, replica in flight.routes.items():
                if self.spec.stage(stage).kind == "generation":
                    self.executor.send(stage, replica, Hold(flight.name, held))

    def _fail_later(self, flight: Flight, name: str, seconds: float, error: Exception) -> None:
        if timer := flight.timers.get(name):
            timer.cancel()
        flight.timers[name] = asyncio.get_running_loop().call_later(seconds, self._fail, flight, error)

    def _fail(self, flight: Flight, error: Exception) -> None:
        """End a request with an error, whether or not its client is reading."""
        flight.fail(error)
        self._release(flight)

    def _release(self, flight: Flight) -> None:
        """Let go of a request, here and in its stages: one whose part is done ignores it, one still at work stops."""
        if self.requests.pop(flight.name, None) is None:
            return
        flight.land()
        for route in flight.routes.items():
            self.load[route] -= 1
        if not self.broken:
            for stage, replica in flight.routes.items():
                self.executor.send(stage, replica, Abort(flight.name))

    def _break(self, cause: str) -> None:
        """There is no going on: every request hears of it, and so does every later one."""
        self.broken = self.broken or cause
        self.collector.skip(set(self.load))
        self.captures.end(self.broken)
        for flight in list(self.requests.values()):
            self._fail(flight, PipelineError(self.broken))

    async def _watch(self) -> None:
        """Nothing waits for ever: a request may queue behind others for long, but not behind silence."""
        while True:
            await asyncio.sleep(STALL_S / 60)
            silent_since = time.monotonic() - STALL_S
            for flight in list(self.requests.values()):
                if max(flight.began, self.heard) < silent_since:
                    cause = f"no stage sent anything for {STALL_S:g} s; it is with {route_text(flight.routes)}"
                    self._fail(flight, StageError(f"request {flight.request_id}: {cause}"))


def route_text(routes: dict[str, int]) -> str:
    return ", ".join(f"{stage} replica {replica}" for stage, replica in routes.items())


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
