"""An answer on its way to its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class CutShort(Exception):
    """The body cannot go on: the connection is closed without its end, so that the client knows."""


class Reply(Response):
    """Sends the parts of a body as they are made. When the client goes away the generator is closed at once.

    The status is sent with the first part, so an exception before it is still answered as an error. A client that
    does not read fills the socket's buffer (64 KiB here, and the kernel's); then the generator is asked for nothing
    more, and after `patience_s` it is closed and the connection too. With `whole` there is one part, and its length.
    """

    def __init__(self, parts: AsyncGenerator[bytes], media_type: str, patience_s: float, whole: bool) -> None:
        super().__init__(media_type=media_type)
        self.parts = parts
        self.patience_s = patience_s
        self.whole = whole
        self.sending_since: float | None = None
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        if not whole:
            self.raw_headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send(send))
        watchers = {asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._deaf())}
        try:
            await asyncio.wait({work, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, *watchers):
                task.cancel()  # no effect on one that is done
            await asyncio.gather(work, *watchers, return_exceptions=True)
        if not work.cancelled() and not isinstance(work.exception(), CutShort):
            work.result()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        clock = asyncio.get_running_loop().time
        started = False
        async with aclosing(self.parts):
            async for part in self.parts:
                if not started:
                    if self.whole:
                        self.raw_headers.append((b"content-length", str(len(part)).encode()))
                    await send(start)
                    started = True
                self.sending_since = clock()
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self.sending_since = None
        if not started:
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deaf(self) -> None:
        """Ends when the client has taken nothing for `patience_s`; a timeout around every part would cost more."""
        clock = asyncio.get_running_loop().time
        while self.sending_since is None or clock() - self.sending_since < self.patience_s:
            await asyncio.sleep(self.patience_s / 8)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
