"""The client: sends the requests of a cell, in closed or open loop, whatever answers them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from omni_lab.core import Request
from omni_lab.metrics.records import RequestRow

Send = Callable[[Request, RequestRow, bool], Awaitable[None]]
"""`Target.send`: one request to its end, noted in its row; the flag says that its audio is to be kept."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The rows of one repeat of a cell, in sending order, and the processor time of this process meanwhile."""

    rows: list[RequestRow]
    cpu_s: float


async def closed_loop(
    send: Send,
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
            await send(request, row, index < keep_audio)
            done()

    cpu = time.process_time()
    async with _tasks() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(slot())
    return Sent(rows, time.process_time() - cpu)


async def open_loop(
    send: Send,
    requests: Sequence[Request],
    arrivals_s: Sequence[float],
    keep_audio: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Sent:
    """Sends each request at its arrival time, however many are in flight. Otherwise as `closed_loop`."""
    rows: list[RequestRow] = []

    async def one(request: Request, row: RequestRow) -> None:
        await send(request, row, row.index < keep_audio)
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
    """A task group that raises the first failure itself: when the target breaks, every request says the same."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
