"""What goes over HTTP: the body of a chat request, and the events of a streamed answer.

A body is vLLM-Omni's or OpenAI's; answers are read in both shapes, whatever was asked.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import mimetypes
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile

from omni_lab.core import Request, RequestError, Sampling
from omni_lab.metrics.definitions import FRAME_SAMPLES
from omni_lab.metrics.records import RequestRow
from omni_lab.models.qwen3_omni.prompt import DEFAULT_SPEAKER

Shape = Literal["omni", "openai"]

MEDIA = ("audio", "image", "video")
WAV_HEADER = 44

SHOWN = 500
"""Characters of an unexpected body that an error shows."""


def chat_body(request: Request, model: str, shape: Shape, speaker: str | None = None) -> bytes:
    """The JSON body of a streamed chat request.

    "omni" states the sampling of thinker and talker (vLLM-Omni's `sampling_params_list`, which replaces its defaults);
    "openai" can state that of the text alone. `speaker` is the voice where the request names none. Raises RequestError
    for media that cannot be sent.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "modalities": list(request.modalities),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    thinker, speaker = request.sampling["thinker"], request.speaker or speaker
    if shape == "openai":
        body |= {"temperature": thinker.temperature, "max_completion_tokens": thinker.max_tokens, "seed": thinker.seed}
        if "audio" in request.modalities:
            body["audio"] = {"voice": speaker or DEFAULT_SPEAKER, "format": "pcm16"}
    else:
        body["stream_options"]["continuous_usage_stats"] = True
        body["sampling_params_list"] = [_sampling(request.sampling[stage]) for stage in ("thinker", "talker")]
        body["return_token_ids"] = request.return_codes
        if speaker:
            body["voice"] = speaker
    return json.dumps(body).encode()


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """As vLLM's SamplingParams: an answer of prescribed length does not end at an end token."""
    return dataclasses.asdict(sampling) | {"ignore_eos": sampling.min_tokens == sampling.max_tokens}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message if isinstance(content, str) else message | {"content": [_part(part) for part in content]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Media become data URLs: a server reads no files of the client's machine."""
    kind = part["type"].removesuffix("_url")
    if kind not in MEDIA:
        return part
    source = part.get(part["type"])
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str):
        raise RequestError(f"expected a path or a URL to send over HTTP, got {type(url).__name__}", f"messages.{kind}")
    if not url.startswith(("data:", "http://", "https://", "file://")):
        mime = mimetypes.guess_type(url)[0] or f"{kind}/*"
        try:
            url = f"data:{mime};base64,{base64.b64encode(Path(url).read_bytes()).decode()}"
        except OSError as error:
            raise RequestError(f"cannot be read: {error}", f"messages.{kind}") from None
    rest = {key: value for key, value in part.items() if key not in ("type", part["type"])}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **rest}


def read_answer(row: RequestRow, reads: Sequence[tuple[int, bytes]], keep_audio: bool) -> None:
    """Notes in `row` what the stream said: `reads` are the times (ns) and bytes of its parts as they arrived.

    An event counts from the time at which its last byte was there. What is wrong with the stream is `row.error`.
    """
    answer = _Answer(row, keep_audio)
    try:
        for time_ns, data in server_sent_events(reads):
            if data == b"[DONE]":
                answer.ended = True
            else:
                answer.note(time_ns, json.loads(data))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, soundfile.LibsndfileError) as error:
        row.error = row.error or f"an event that is no chat chunk: {error!r}"
    if not answer.ended and not row.error:
        body = b"".join(part for _, part in reads)[-SHOWN:].decode(errors="replace")
        row.error = f"the stream ended without a finish reason or [DONE]; its end: {body!r}"


def server_sent_events(reads: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Each event's time and data. Comments and other fields are skipped; an event may be spread over reads."""
    rest, data = b"", []
    for time_ns, part in reads:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield time_ns, b"\n".join(data)
                data = []


class _Answer:
    """The events of one answer as they are laid into its row."""

    def __init__(self, row: RequestRow, keep_audio: bool) -> None:
        self.row = row
        self.keep_audio = keep_audio
        self.counted = 0
        self.samples = 0
        self.ended = False

    def note(self, time_ns: int, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.row.error = f"the stream told an error: {json.dumps(event['error'])}"
            return
        usage = event.get("usage") or {}
        if usage.get("prompt_tokens"):
            self.row.prompt_tokens = usage["prompt_tokens"]
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            audio = delta.get("audio") or {}
            sound = audio.get("data") or (delta.get("content") if event.get("modality") == "audio" else None)
            text = audio.get("transcript") or (delta.get("content") if event.get("modality") != "audio" else None)
            if sound:
                self._sound(time_ns, base64.b64decode(sound, validate=True))
            ids = choice.get("token_ids") or []
            if text or ids or (event.get("modality") == "text" and usage.get("completion_tokens", 0) > self.counted):
                self._text(time_ns, text or "", ids, usage.get("completion_tokens"))
            if choice.get("finish_reason"):
                self.ended = True
                self.row.reasons |= choice.get("finish_reasons") or {
                    event.get("modality") or "text": choice["finish_reason"]
                }

    def _text(self, time_ns: int, text: str, ids: list[int], counted: int | None) -> None:
        """New tokens are those of the usage so far, else the ids told, else one for each event."""
        new = counted - self.counted if counted else len(ids) or 1
        self.counted += new
        self.row.text_ns.append(time_ns)
        self.row.text_tokens.append(new)
        self.row.token_ids += ids
        self.row.text += text

    def _sound(self, time_ns: int, data: bytes) -> None:
        samples = decode_sound(data)
        if not len(samples):
            return
        frames = -(-self.samples // FRAME_SAMPLES)  # an answer may lack up to one frame's samples at its end
        self.samples += len(samples)
        self.row.audio_ns.append(time_ns)
        self.row.audio_samples.append(len(samples))
        self.row.audio_frames.append(-(-self.samples // FRAME_SAMPLES) - frames)
        if self.keep_audio:
            self.row.audio.append(samples)


def decode_sound(data: bytes) -> np.ndarray:
    """Samples, float32 in [-1, 1], of one chunk: a wav or other sound file, or raw 16-bit PCM, mono at 24 kHz.

    A streamed wav has a header without a length at its start only; what follows is raw.
    """
    if data[:4] == b"RIFF" and data[12:16] == b"fmt " and data[20:22] == b"\x01\x00" and data[36:40] == b"data":
        return np.frombuffer(data[WAV_HEADER : len(data) - len(data) % 2], "<i2").astype(np.float32) / 32768
    if data[:4] in (b"RIFF", b"fLaC", b"OggS") or data[:3] == b"ID3":
        samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        return samples.mean(axis=1)
    return np.frombuffer(data[: len(data) - len(data) % 2], "<i2").astype(np.float32) / 32768
