"""Media that requests name, made bytes: data URLs and files of one directory, within limits. Nothing is fetched."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from omni_lab.core import RequestError
from omni_lab.models.qwen3_omni.media import UNREADABLE, because
from omni_lab.models.qwen3_omni.messages import decode_base64
from omni_lab.settings import ServerConfig

KINDS = {"input_audio": "audio", "audio_url": "audio", "image_url": "image", "video_url": "video"}
PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Formats that Pillow reads by itself; of others it starts programs."""

FORMATS = {"image": ", ".join(PICTURES), "video": "an animation (GIF, WEBP or PNG)"}

CHARACTERS_A_TOKEN = 256
"""More than any token of a text has: a longer text cannot fit and is refused before it is tokenized."""


class MediaReader:
    """Reads the media of one request after another, and refuses what is beyond the server's limits.

    Limits count for a request as a whole: pictures and clips by their decoded pixels, recordings by what they take
    side by side, padded to the longest.
    """

    def __init__(self, limits: ServerConfig, max_prompt_tokens: int) -> None:
        self.limits = limits
        self.characters = max_prompt_tokens * CHARACTERS_A_TOKEN
        self.directory = Path(limits.media_dir).resolve() if limits.media_dir else None

    def read(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with bytes in place of addresses. Raises RequestError naming the part to mend."""
        used = _Used(self.limits, self.characters)
        return [self._message(message, f"messages[{index}]", used) for index, message in enumerate(messages)]

    def _message(self, message: dict[str, Any], field: str, used: _Used) -> dict[str, Any]:
        if message.get("role") == "developer":
            message = {**message, "role": "system"}
        content = message.get("content")
        if isinstance(content, str):
            used.text(content)
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._part(p, f"{field}.content[{i}]", used) for i, p in enumerate(content)]}

    def _part(self, part: Any, field: str, used: _Used) -> Any:
        if not isinstance(part, dict) or part.get("type") == "text":
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                used.text(part["text"])
            return part
        key = part.get("type")
        if not isinstance(key, str) or key not in KINDS:
            raise RequestError(f"unknown part type {key!r}; expected one of text, {', '.join(KINDS)}", f"{field}.type")
        if key == "input_audio":
            data = part[key].get("data") if isinstance(part.get(key), dict) else None
            if isinstance(data, str):  # anything else is refused with the message
                used.medium("audio", decode_base64(data, f"{field}.{key}.data"), f"{field}.{key}")
            return part
        url = part.get(key)
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise RequestError(f"expected an address, got {type(url).__name__}", f"{field}.{key}.url")
        data = self._fetch(url, f"{field}.{key}.url")
        used.medium(KINDS[key], data, f"{field}.{key}")
        return {**part, key: {"url": data}}

    def _fetch(self, url: str, field: str) -> bytes:
        if url.startswith("data:"):
            header, comma, content = url.partition(",")
            if not comma or not header.endswith(";base64"):
                raise RequestError("expected a data URL of the form data:<type>;base64,<content>", field)
            return decode_base64(content, field)
        if not url.startswith("file://"):
            raise RequestError("addresses are not fetched; send a data URL, or file:// of an allowed directory", field)
        if self.directory is None:
            raise RequestError("no files are allowed here (server.media_dir); send a data URL", field)
        return self._file(url, field)

    def _file(self, url: str, field: str) -> bytes:
        """A file below the allowed directory once all links are resolved. What lies outside is not told apart."""
        try:
            address = urlsplit(url)
            path = (self.directory / (unquote(address.netloc + address.path))).resolve(strict=True)
            allowed = path.is_relative_to(self.directory) and path.is_file()
            size = path.stat().st_size
        except (OSError, ValueError, RuntimeError):  # missing, no valid name, a circle of links
            allowed, size = False, 0
        if not allowed:
            raise RequestError("there is no such file in the allowed directory", field)
        if size > self.limits.max_body_mb << 20:
            raise RequestError(f"the file has {size} bytes; the limit is {self.limits.max_body_mb} MiB", field)
        return path.read_bytes()


class _Used:
    """What a request has used up of its limits."""

    def __init__(self, limits: ServerConfig, characters: int) -> None:
        self.limits = limits
        self.characters = characters
        self.recordings, self.longest_s = 0, 0.0
        self.pixels = {"image": 0, "video": 0}

    def text(self, text: str) -> None:
        self.characters -= len(text)
        if self.characters < 0:
            raise RequestError("the text is longer than any prompt that fits; send less", "messages")

    def medium(self, kind: str, data: bytes, field: str) -> None:
        """Counts a medium by its header alone, before anything of it is decoded."""
        if kind == "audio":
            self._audio(data, field)
        else:
            self._pixels(kind, data, field)

    def _audio(self, data: bytes, field: str) -> None:
        import soundfile

        try:
            info = soundfile.info(io.BytesIO(data))
        except (soundfile.SoundFileError, OSError, ValueError) as error:
            raise RequestError(f"cannot be read as audio (wav, flac, mp3 or ogg){because(error)}", field) from None
        self.recordings += 1
        self.longest_s = max(self.longest_s, info.frames / info.samplerate)
        seconds, limit = self.recordings * self.longest_s, self.limits.max_audio_s
        if seconds > limit:
            raise RequestError(f"{seconds:.1f} s of audio, padded to the longest; the limit is {limit:g} s", field)

    def _pixels(self, kind: str, data: bytes, field: str) -> None:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data), formats=PICTURES) as image:
                frames = getattr(image, "n_frames", 1) if kind == "video" else 1
                self.pixels[kind] += frames * math.prod(image.size)
        except UNREADABLE as error:
            raise RequestError(f"cannot be read as {FORMATS[kind]}{because(error)}", field) from None
        millions, limit = self.pixels[kind] / 1e6, getattr(self.limits, f"max_{kind}_mp")
        if millions > limit:
            raise RequestError(f"{millions:.1f} million pixels in all; the limit is {limit:g}", field)
