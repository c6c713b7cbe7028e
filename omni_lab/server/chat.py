"""`POST /v1/chat/completions`: a chat in, text and speech out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from omni_lab.core import AudioChunk, Event, Finished, Request, TextDelta
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.server.bodies import ChatBody, StageSampling
from omni_lab.server.metrics import Heard
from omni_lab.server.reply import Reply
from omni_lab.server.service import Service, new_id
from omni_lab.server.sound import encode
from omni_lab.server.wire_shapes import AUDIO_KEPT_S, Answer, OmniShape, OpenAIShape, finish_reason, stream

ENDPOINT = "chat"


def chat_reply(service: Service, body: ChatBody) -> Reply:
    """The answer to a chat, in OpenAI's shape if `audio` names a voice, else in vLLM-Omni's."""
    service.check_model(body.model)
    openai = bool(body.audio and body.audio.voice)
    request = _request(service, body, openai)
    heard = Heard()
    options = body.stream_options
    answer = Answer(
        request.id,
        service.model,
        heard,
        form=body.audio.format if body.audio else "wav",
        usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        token_ids=body.return_token_ids,
    )
    events = service.events(request, ENDPOINT, heard)
    if body.stream:
        parts = stream(events, OpenAIShape(answer) if openai else OmniShape(answer))
    else:
        parts = _whole(events, answer, request.modalities, openai)
    kind = "text/event-stream" if body.stream else "application/json"
    return Reply(parts, kind, service.limits.slow_reader_s, whole=not body.stream)


def _request(service: Service, body: ChatBody, openai: bool) -> Request:
    thinker = body.model_copy(update={"max_tokens": body.max_completion_tokens or body.max_tokens})
    stages = list(service.experiment.stages)
    given: dict[str, StageSampling] = {"thinker": thinker} | dict(zip(stages, body.sampling_params_list, strict=False))
    modalities = body.modalities or service.limits.modalities
    if openai and "audio" in modalities:
        modalities = ["text", "audio"]  # the transcript is part of the audio
    voice = body.audio and body.audio.voice
    return Request(
        new_id("chatcmpl"),
        body.messages,
        tuple(dict.fromkeys(modalities)),
        voice or body.voice or body.speaker,
        service.sampling(given),
        stop=tuple(body.stop),
    )


async def _whole(
    events: AsyncGenerator[Event], answer: Answer, modalities: tuple[str, ...], openai: bool
) -> AsyncGenerator[bytes]:
    """One `chat.completion`."""
    samples: list[np.ndarray] = []
    token_ids: list[int] = []
    async with aclosing(events):
        finished = await _collect(events, samples, token_ids)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(finished.reasons)}
    message: dict[str, Any] = {"role": "assistant", "content": finished.text if "text" in modalities else None}
    if "audio" in modalities:
        wave = np.concatenate([np.zeros(0, np.float32), *samples])
        message["audio"] = {
            "id": answer.audio_id,
            "data": await asyncio.to_thread(encode, wave, answer.form),  # bytes; JSON has them as base64
            "expires_at": answer.created + AUDIO_KEPT_S,
            "transcript": finished.text if openai else "",
        }
        about = {"format": answer.form, "sample_rate_hz": SAMPLE_RATE, "frame_count": len(wave), "channels": 1}
        choice["audio_metadata"] = about
        if openai:
            message["content"] = None
    if answer.token_ids:
        choice["token_ids"] = token_ids
    choice |= {"message": message, "logprobs": None, "finish_reasons": finished.reasons}
    yield msgspec.json.encode(answer.object("chat.completion", [choice]) | {"usage": answer.used()})


async def _collect(events: AsyncIterator[Event], samples: list[np.ndarray], token_ids: list[int]) -> Finished:
    async for event in events:
        if isinstance(event, AudioChunk):
            samples.append(event.samples)
        elif isinstance(event, TextDelta):
            token_ids += event.token_ids
    return event
