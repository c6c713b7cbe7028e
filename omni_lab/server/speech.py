"""`POST /v1/audio/speech`: a text in, speech out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from omni_lab.core import AudioChunk, Event, Request
from omni_lab.server.bodies import SpeechBody, StageSampling
from omni_lab.server.errors import ApiError
from omni_lab.server.metrics import Heard
from omni_lab.server.reply import CutShort, Reply
from omni_lab.server.service import Service, new_id
from omni_lab.server.sound import encode, media_type, pcm16, wav_header
from omni_lab.server.wire_shapes import sse

ENDPOINT = "speech"

log = logging.getLogger("uvicorn.error")


def speech_reply(service: Service, body: SpeechBody) -> Reply:
    """The speech as one file; as it is made, raw, if it is PCM or `stream` is set; or as server-sent events."""
    service.check_model(body.model)
    request, heard = _request(service, body), Heard()
    events = service.events(request, ENDPOINT, heard)
    form, patience_s = body.response_format, service.limits.slow_reader_s
    if body.stream_format == "sse":
        return Reply(_events(events, form, heard), "text/event-stream", patience_s, whole=False)
    if body.stream or form == "pcm":
        return Reply(_raw(events, form), media_type(form), patience_s, whole=False)
    return Reply(_file(events, form), media_type(form), patience_s, whole=True)


def _request(service: Service, body: SpeechBody) -> Request:
    """The model is asked to read the text, with the words of the experiment's workload."""
    workload = service.experiment.workload
    system = body.instructions or workload.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": workload.prompt_template.replace("{text}", body.input)})
    seeds = {stage: StageSampling(seed=body.seed) for stage in service.experiment.stages} if body.seed else {}
    return Request(new_id("speech"), messages, ("audio",), body.voice or body.speaker, service.sampling(seeds))


async def _pieces(events: AsyncGenerator[Event], form: str) -> AsyncGenerator[bytes]:
    """The bytes of each chunk; the first has the only header that a wav stream has."""
    header = wav_header() if form == "wav" else b""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AudioChunk) and len(event.samples):
                yield header + pcm16(event.samples)
                header = b""
    if header:
        yield wav_header(0)


async def _raw(events: AsyncGenerator[Event], form: str) -> AsyncGenerator[bytes]:
    started = False
    try:
        async with aclosing(_pieces(events, form)) as pieces:
            async for piece in pieces:
                yield piece
                started = True
    except ApiError as error:
        if not started:
            raise
        log.error("speech cut short: %s", error.detail)
        raise CutShort from error


async def _events(events: AsyncGenerator[Event], form: str, heard: Heard) -> AsyncGenerator[bytes]:
    started = False
    try:
        async with aclosing(_pieces(events, form)) as pieces:
            async for piece in pieces:
                yield sse({"type": "speech.audio.delta", "audio": piece, "response_format": form})
                started = True
    except ApiError as error:
        if not started:
            raise
        yield sse({"type": "speech.audio.error"} | error.body)
        return
    usage = {"input_tokens": heard.prompt_tokens, "output_tokens": heard.codec_frames}
    usage["total_tokens"] = sum(usage.values())
    yield sse({"type": "speech.audio.done", "usage": usage})


async def _file(events: AsyncGenerator[Event], form: str) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        samples = [event.samples async for event in events if isinstance(event, AudioChunk)]
    yield await asyncio.to_thread(encode, np.concatenate([np.zeros(0, np.float32), *samples]), form)
