"""An OpenAI-compatible omni server as a target: streams answers, keeps them as they come, reads them afterwards."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from omni_lab.core import CLIENT, PipelineError, Request, RequestError
from omni_lab.metrics.records import ChunkRow, RequestRow
from omni_lab.pipeline.collector import Measured
from omni_lab.workload.wire import SHOWN, Shape, chat_body, read_answer

TIMEOUT_S = 900.0
"""Longest time of one request."""

IDLE_S = 0.5
"""Idle connections are closed long before a server does it (uvicorn after 5 s): a request on one that the server is
just closing would fail, and that would count against the server."""

KEPT_BYTES = 1 << 29
"""Answers are read when the load is over, unless they come to more than this: then each as it ends."""

Reads = list[tuple[int, bytes]]


class HttpTarget:
    """One server. Its inside is out of sight: no steps, and of the chunks only those that reach the client."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, shape: Shape = "omni", speaker: str | None = None
    ) -> None:
        self.session = session
        self.url = f"{url}/v1/chat/completions"
        self.model = model
        self.shape: Shape = shape
        self.speaker = speaker
        self.effective: dict[str, Any] = {"server": url, "model": model, "shape": shape, "speaker": speaker}
        self.replicas: dict[str, int] = {}
        self.unread: list[tuple[RequestRow, Reads, bool]] = []
        self.unread_bytes = 0
        self.chunks: list[ChunkRow] = []

    async def send(self, request: Request, row: RequestRow, keep_audio: bool) -> None:
        reads: Reads = []
        try:
            body = chat_body(request, self.model, self.shape, self.speaker)
            row.sent_ns = time.monotonic_ns()
            async with self.session.post(self.url, data=body, headers={"X-Request-ID": request.id}) as response:
                if response.status == 200:
                    async for part in response.content.iter_any():
                        reads.append((time.monotonic_ns(), part))
                else:
                    row.error = f"HTTP {response.status}: {' '.join((await response.text())[:SHOWN].split())}"
        except TimeoutError:
            row.error = f"no whole answer within {TIMEOUT_S:g} s"
        except (RequestError, aiohttp.ClientError, OSError) as error:
            row.error = " ".join(str(error).split()) or type(error).__name__
        row.sent_ns = row.sent_ns or time.monotonic_ns()
        row.end_ns = reads[-1][0] if reads and not row.error else time.monotonic_ns()
        self.unread.append((row, reads, keep_audio))
        self.unread_bytes += sum(len(part) for _, part in reads)
        if self.unread_bytes > KEPT_BYTES:
            self._read()

    async def take_records(self) -> Measured:
        self._read()
        measured, self.chunks = Measured(chunks=self.chunks), []
        return measured

    def tokens(self, request: Request, row: RequestRow) -> dict[str, Any]:
        return {"text_token_ids": row.token_ids} if row.token_ids else {}

    def _read(self) -> None:
        for row, reads, keep_audio in self.unread:
            if reads or not row.error:
                read_answer(row, reads, keep_audio)
            for index, time_ns in enumerate(row.audio_ns):
                frames, size = row.audio_frames[index], 2 * row.audio_samples[index]
                last = index == len(row.audio_ns) - 1
                self.chunks.append(
                    ChunkRow(f"server->{CLIENT}", row.id, index, frames, size, time_ns, time_ns, time_ns, last)
                )
        self.unread, self.unread_bytes = [], 0


@asynccontextmanager
async def connect(
    url: str,
    api_key: str | None = None,
    model: str | None = None,
    shape: Shape = "omni",
    speaker: str | None = None,
) -> AsyncIterator[HttpTarget]:
    """A server that is running, with a pool of connections as large as the load needs.

    `url`: with or without the /v1 that OpenAI's clients want behind it.
    `model`: the name to ask for; None takes the first of /v1/models. `speaker`: the voice of requests that name none;
    None leaves it to the server. Raises PipelineError if nobody answers.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=30),
        headers=headers,
        auto_decompress=True,
        read_bufsize=1 << 20,
    ) as session:
        yield HttpTarget(session, url, model or await _served_model(session, url), shape, speaker)


async def _served_model(session: aiohttp.ClientSession, url: str) -> str:
    where = f"{url}/v1/models"
    try:
        async with session.get(where, timeout=aiohttp.ClientTimeout(total=30)) as response:
            text = await response.text()
            if response.status != 200:
                raise PipelineError(f"{where}: HTTP {response.status}: {text[:SHOWN]}")
            return (await response.json(content_type=None))["data"][0]["id"]
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise PipelineError(f"{where}: nobody answers: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PipelineError(f"{where}: expected a list of models, got {text[:SHOWN]}: {error!r}") from None
