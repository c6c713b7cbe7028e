"""A server that answers every request with the same prepared stream: what is left to measure is the client.

`python -m omni_lab.workload.echo_server` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import time
from dataclasses import dataclass

import numpy as np
import soundfile

from omni_lab.metrics.definitions import FRAME_SAMPLES, SAMPLE_RATE

STAMP = b"%020d"
PLACE = b'"sent_ns": "' + b"0" * 20 + b'"'
"""Where an event says when it was written, in ns of the machine's clock."""


@dataclass(frozen=True)
class Answer:
    """`tokens` events of text, then `chunks` of `frames` codec frames each, with `pause_s` before every event."""

    tokens: int = 40
    chunks: int = 5
    frames: int = 20
    pause_s: float = 0.0

    def events(self) -> list[bytes]:
        """Server-sent events in vLLM-Omni's shape, each with a place for its time."""
        wave = io.BytesIO()
        samples = np.sin(np.arange(self.frames * FRAME_SAMPLES) / 20) / 4
        soundfile.write(wave, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
        sound = base64.b64encode(wave.getvalue()).decode()
        contents = [("text", "word ")] * self.tokens + [("audio", sound)] * self.chunks
        events = [
            {"sent_ns": "0" * 20, "modality": kind, "choices": [{"index": 0, "delta": {"content": content}}]}
            for kind, content in contents
        ]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        return [f"data: {json.dumps(event)}\n\n".encode() for event in events]


async def serve(answer: Answer) -> None:
    """Serves on a free port of this machine, printed on the first line, until standard input ends."""
    prepared = [_chunked(event) for event in answer.events()]
    end = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(_length(request))
                writer.write(head)
                start = time.monotonic()
                for index, event in enumerate(prepared, 1):
                    if answer.pause_s:  # from the start, so that late events do not add up
                        await asyncio.sleep(start + index * answer.pause_s - time.monotonic())
                    writer.write(event.replace(PLACE, PLACE[:12] + STAMP % time.monotonic_ns() + b'"'))
                    await writer.drain()
                writer.write(end)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has gone
            writer.close()

    server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))


if __name__ == "__main__":
    asyncio.run(serve(Answer(pause_s=float(sys.argv[1]))))
