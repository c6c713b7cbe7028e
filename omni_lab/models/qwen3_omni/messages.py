"""Chat messages as clients send them, checked: what the chat template sees, and the media apart."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from omni_lab.core import RequestError

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("audio", "image", "video")
AUDIO_FORMATS = ("wav", "flac", "mp3", "ogg")
OPTIONS = {"audio": {"rate"}, "image": set(), "video": {"fps"}}
"""Further keys that a media part may have."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One recording, picture or clip. `source` is a path, bytes, a data URL or raw values (see `media.py`)."""

    kind: str
    source: Any
    options: dict[str, Any]
    field: str


def parse_messages(messages: Any) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Messages in the form that chat templates expect, and their media in order.

    Raises RequestError that names the message and the part to mend.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"expected a list of messages, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("there are none; send at least one message", "messages")
    media: list[MediaPart] = []
    return [_message(message, f"messages[{index}]", media) for index, message in enumerate(messages)], media


def _message(message: Any, field: str, media: list[MediaPart]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"expected {{'role': ..., 'content': ...}}, got {type(message).__name__}", field)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestError(f"unknown role {role!r}; expected one of {', '.join(ROLES)}", f"{field}.role")
    for key, value in message.items():
        if key not in ("role", "content") and value is not None:
            raise RequestError("is not supported in a message; leave it out", f"{field}.{key}")
    if isinstance(content, list | tuple):
        content = [_part(part, f"{field}.content[{index}]", role, media) for index, part in enumerate(content)]
        empty = all(part["type"] == "text" and not part["text"].strip() for part in content)
    elif isinstance(content, str):
        empty = not _encodable(content, f"{field}.content").strip()
    elif content is None:
        empty = True
    else:
        raise RequestError(f"expected a text or a list of parts, got {type(content).__name__}", f"{field}.content")
    if empty:
        raise RequestError("the message is empty; give it a text or media", f"{field}.content")
    return {"role": role, "content": content}


def _part(part: Any, field: str, role: str, media: list[MediaPart]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError(f"expected {{'type': ..., ...}}, got {type(part).__name__}", field)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"expected a text, got {type(part.get('text')).__name__}", f"{field}.text")
        return {"type": "text", "text": _encodable(part["text"], f"{field}.text")}
    found = _media(part, field)
    if role != "user":
        raise RequestError(f"{found.kind} belongs into user messages, not into {role} messages", field)
    media.append(found)
    return {"type": found.kind, found.kind: ""}


def _encodable(text: str, field: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("contains half of a surrogate pair, which is no character", field)
    return text


def _media(part: dict[str, Any], field: str) -> MediaPart:
    """A media part in our form (`audio`) or in OpenAI's (`input_audio`, `audio_url`, `image_url`, `video_url`)."""
    key = part.get("type")
    if key == "input_audio":
        kind, source = "audio", _input_audio(part.get(key), f"{field}.{key}")
    elif key in MEDIA:
        kind, source = key, part.get(key)
    elif isinstance(key, str) and key.removesuffix("_url") in MEDIA:
        kind, source = key.removesuffix("_url"), part.get(key)
        source = source.get("url") if isinstance(source, dict) else source
    else:
        known = ", ".join(("text", *MEDIA, "input_audio", *(f"{kind}_url" for kind in MEDIA)))
        raise RequestError(f"unknown part type {key!r}; expected one of {known}", f"{field}.type")
    if source is None:
        raise RequestError("is missing", f"{field}.{key}")
    options = {name: value for name, value in part.items() if name not in ("type", key) and value is not None}
    if unknown := options.keys() - OPTIONS[kind]:
        raise RequestError(f"is not supported with {key}; leave it out", f"{field}.{min(unknown, key=str)}")
    return MediaPart(kind, source, options, f"{field}.{key}")


def _input_audio(value: Any, field: str) -> bytes:
    if not isinstance(value, dict) or not isinstance(value.get("data"), str):
        raise RequestError("expected {'data': base64, 'format': ...}", field)
    if value.get("format", "wav") not in AUDIO_FORMATS:
        raise RequestError(
            f"unknown format {value['format']!r}; expected one of {', '.join(AUDIO_FORMATS)}", f"{field}.format"
        )
    return decode_base64(value["data"], f"{field}.data")


def decode_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("is not valid base64", field) from None
