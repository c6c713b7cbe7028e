"""The in-process client: sends the requests of a cell to a pipeline and notes when what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from omni_lab.core import AudioChunk, Event, Finished, Request, RequestError, StageError, TextDelta
from omni_lab.metrics.records import RequestRow


class Generates(Protocol):
    """What the client needs of a pipeline."""

    def generate(self, request: Request) -> AsyncGenerator[Event]: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """The rows of one repeat of a cell, in sending order, and the processor time of this process meanwhile."""

    rows: list[RequestRow]
    cpu_s: float


async def closed_loop(
    pipeline: Generates,
    requests: Sequence[Request],
    concurrency: int,
    keep_audio: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Sent:
    """Keeps `concurrency` requests in flight until all have ended.

    The audio of the first `keep_audio` requests stays in their rows; `done` is called after each request.
    """
    waiting = iter(enumerate(requests))
    rows: list[RequestRow] = []

    async def slot() -> None:
        for index, request in waiting:
            row = RequestRow(request.id, index, due_ns=time.monotonic_ns())
            rows.append(row)
            await _send(pipeline, request, row, index < keep_audio)
            done()

    cpu = time.process_time()
    async with _tasks() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(slot())
    return Sent(rows, time.process_time() - cpu)


async def open_loop(
    pipeline: Generates,
    requests: Sequence[Request],
    arrivals_s: Sequence[float],
    keep_audio: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Sent:
    """Sends each request at its arrival time, however many are in flight. Otherwise as `closed_loop`."""
    rows: list[RequestRow] = []

    async def one(request: Request, row: RequestRow) -> None:
        await _send(pipeline, request, row, row.index < keep_audio)
        done()

    cpu = time.process_time()
    start_ns = time.monotonic_ns()
    async with _tasks() as group:
        for index, (request, arrival_s) in enumerate(zip(requests, arrivals_s, strict=True)):
            due_ns = start_ns + round(arrival_s * 1e9)
            await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            rows.append(RequestRow(request.id, index, due_ns))
            group.create_task(one(request, rows[-1]))
    return Sent(rows, time.process_time() - cpu)


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first failure itself: when the pipeline breaks, every request says the same."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _send(pipeline: Generates, request: Request, row: RequestRow, keep_audio: bool) -> None:
    """One request, from its send time to its end. What is wrong with it alone is noted in its row."""
    row.sent_ns = time.monotonic_ns()
    try:
        async with aclosing(pipeline.generate(request)) as events:
            async for event in events:
                _note(row, event, keep_audio)
        if not row.reasons:
            row.error = "the answer ended without a finish reason"
        elif "abort" in row.reasons.values():
            row.error = "aborted"
    except (RequestError, StageError) as error:
        row.error = " ".join(str(error).split())
    row.end_ns = row.end_ns or time.monotonic_ns()


def _note(row: RequestRow, event: Event, keep_audio: bool) -> None:
    now = time.monotonic_ns()
    match event:
        case TextDelta():
            row.text_ns.append(now)
            row.text_tokens.append(len(event.token_ids))
            row.token_ids += event.token_ids
            row.text += event.text
        case AudioChunk():
            row.audio_ns.append(now)
            row.audio_samples.append(len(event.samples))
            row.audio_frames.append(event.frames)
            if keep_audio:
                row.audio.append(event.samples)
            if event.codes is not None:
                row.codes.append(event.codes)
        case Finished():
            row.end_ns = now
            row.reasons = event.reasons
            row.prompt_tokens = event.prompt_tokens
            row.text = event.text
