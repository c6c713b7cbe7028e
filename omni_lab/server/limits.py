"""Who may come in, and how many at a time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_lab.server.errors import ApiError, error_response

OPEN = ("/", "/health")
"""Paths that need no key, beside those below ASSETS: the page holds nothing, and a load balancer has no key."""

ASSETS = "/page/"
"""Where the page's own files are."""


class Admission:
    """A fixed number of requests at work, a bounded line of those that wait for a bounded time; 429 for all others."""

    def __init__(self, slots: int, queue: int, wait_s: float) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.queue = queue
        self.wait_s = wait_s
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Holds a slot while the block runs. Raises ApiError 429 with Retry-After."""
        if self.slots.locked() and self.waiting >= self.queue:
            raise self._busy(f"{self.running} requests are at work and {self.waiting} wait")
        self.waiting += 1
        try:
            async with asyncio.timeout(self.wait_s):
                await self.slots.acquire()
        except TimeoutError:
            raise self._busy(f"no turn within {self.wait_s:g} s (server.queue_timeout_s)") from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.slots.release()

    def _busy(self, cause: str) -> ApiError:
        return ApiError(429, f"the server is busy: {cause}; try again later", headers={"Retry-After": "1"})


class Gate:
    """ASGI middleware: the key, if there is one, and bounds on the size of a body and the time it takes to arrive."""

    def __init__(self, app: ASGIApp, key: str | None, max_body_mb: int, body_timeout_s: float) -> None:
        self.app = app
        self.expected = f"Bearer {key}".encode() if key else None
        self.max_body_mb = max_body_mb
        self.body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.expected and not _is_open(scope):
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self.expected):
                error = ApiError(401, "expected the header Authorization: Bearer <key>", "Authorization")
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, self._bounded(receive) if scope["type"] == "http" else receive, send)

    def _bounded(self, receive: Receive) -> Receive:
        deadline = asyncio.get_running_loop().time() + self.body_timeout_s
        size, complete = 0, False

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"body: did not arrive within {self.body_timeout_s:g} s", "body") from None
            size += len(message.get("body", b""))
            if size > self.max_body_mb << 20:
                raise ApiError(413, f"body: larger than {self.max_body_mb} MiB (server.max_body_mb)", "body")
            complete = not message.get("more_body", False)
            return message

        return bounded


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no key."""
    return scope["path"] in OPEN or scope["path"].startswith(ASSETS) or scope["method"] == "OPTIONS"
