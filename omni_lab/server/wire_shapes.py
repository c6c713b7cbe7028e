"""The two shapes of an answer in text and speech: vLLM-Omni's and OpenAI's."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omni_lab.core import AudioChunk, Event, Finished, TextDelta
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.server.errors import ApiError
from omni_lab.server.metrics import Heard
from omni_lab.server.sound import encode, pcm16, wav_header

DONE = b"data: [DONE]\n\n"
AUDIO_KEPT_S = 24 * 3600
"""What `expires_at` says. Nothing is kept here: an answer's audio cannot be named in a later message."""

_json = msgspec.json.Encoder()


def sse(value: Any) -> bytes:
    """One server-sent event; bytes in it become base64. vLLM-Omni's client needs the single space behind `data:`."""
    return b"data: " + _json.encode(value) + b"\n\n"


@dataclass(slots=True)
class Answer:
    """What every chunk of one answer says again, and how much of it there has been."""

    id: str
    model: str
    heard: Heard
    form: str = "wav"
    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    audio_id: str = field(default_factory=lambda: f"audio_{secrets.token_hex(8)}")

    def used(self) -> dict[str, Any]:
        """OpenAI's `usage`. Completion tokens are the thinker's; codec frames stand apart, as audio tokens."""
        return {
            "prompt_tokens": self.heard.prompt_tokens,
            "completion_tokens": self.heard.text_tokens,
            "total_tokens": self.heard.prompt_tokens + self.heard.text_tokens,
            "completion_tokens_details": {"audio_tokens": self.heard.codec_frames},
        }

    def ids(self, event: TextDelta) -> dict[str, list[int]]:
        """What a choice says of its tokens: nothing if they were not asked for."""
        return {"token_ids": event.token_ids} if self.token_ids else {}

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, delta: dict[str, Any], finish: str | None = None, **further: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **further}
        return self.object("chat.completion.chunk", [choice])


class OmniShape:
    """vLLM-Omni's: `modality` in every chunk; audio is base64 of a complete wav file for each chunk, as content."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def start(self) -> bytes:
        return sse(self.answer.chunk({"role": "assistant", "content": ""}) | {"modality": "text"})

    def text(self, event: TextDelta) -> bytes:
        answer = self.answer
        if not (event.text or answer.continuous_usage or answer.token_ids):
            return b""
        usage = {"usage": answer.used()} if answer.continuous_usage else {}
        return sse(answer.chunk({"content": event.text}, **answer.ids(event)) | {"modality": "text"} | usage)

    def audio(self, event: AudioChunk) -> bytes:
        file = encode(event.samples, "wav")
        about = {"format": "wav", "sample_rate_hz": SAMPLE_RATE, "frame_count": len(event.samples), "channels": 1}
        return sse(self.answer.chunk({"content": file}, audio_metadata=about) | {"modality": "audio"})

    def end(self, reasons: dict[str, str]) -> bytes:
        chunk = self.answer.chunk({"content": ""}, finish_reason(reasons), finish_reasons=reasons)
        return sse(chunk | {"modality": "text"})


class OpenAIShape:
    """OpenAI's: `delta.audio` with id, data, transcript and expires_at; the text is the transcript.

    The data of all chunks is one stream: raw PCM, or a wav file with one header at its start.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.header = wav_header() if answer.form == "wav" else b""

    def start(self) -> bytes:
        return sse(self.answer.chunk({"role": "assistant", "audio": {"id": self.answer.audio_id, "transcript": ""}}))

    def text(self, event: TextDelta) -> bytes:
        if not (event.text or self.answer.token_ids):
            return b""
        return self._audio({"transcript": event.text}, **self.answer.ids(event))

    def audio(self, event: AudioChunk) -> bytes:
        data, self.header = self.header + pcm16(event.samples), b""
        return self._audio({"data": data})

    def end(self, reasons: dict[str, str]) -> bytes:
        expiry = self._audio({"expires_at": self.answer.created + AUDIO_KEPT_S})
        return expiry + sse(self.answer.chunk({}, finish_reason(reasons), finish_reasons=reasons))

    def _audio(self, content: dict[str, Any], **further: Any) -> bytes:
        return sse(self.answer.chunk({"audio": {"id": self.answer.audio_id} | content}, **further))


async def stream(events: AsyncGenerator[Event], shape: OmniShape | OpenAIShape) -> AsyncGenerator[bytes]:
    """Server-sent events of an answer, from its first event to [DONE]. An error after the first is an event too."""
    answer, started = shape.answer, False
    try:
        async with aclosing(events):
            async for event in events:
                if not started:
                    yield shape.start()
                    started = True
                if part := _part(shape, event):
                    yield part
    except ApiError as error:
        if not started:
            raise
        yield sse(error.body) + DONE
        return
    if answer.usage:
        yield sse(answer.object("chat.completion.chunk", []) | {"usage": answer.used()})
    yield DONE


def _part(shape: OmniShape | OpenAIShape, event: Event) -> bytes:
    match event:
        case TextDelta():
            return shape.text(event)
        case AudioChunk():  # an answer may end with a chunk without samples
            return shape.audio(event) if len(event.samples) else b""
        case Finished():
            return shape.end(event.reasons)


def finish_reason(reasons: dict[str, str]) -> str:
    """One for both modalities: the text's where there is text. `finish_reasons` beside it has both."""
    return reasons.get("text") or reasons["audio"]
