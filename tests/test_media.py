"""Media files of every kind, and the errors of requests: each names the field to mend."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from omni_lab.core import Request, RequestError
from omni_lab.models.qwen3_omni.prompt import FrontEnd
from tests.oracle.requests import picture, user


@pytest.fixture(scope="module")
def front_end(nano: Path) -> FrontEnd:
    return FrontEnd(nano)


def tensors(front_end: FrontEnd, *parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    return front_end.prepare(Request(id="r", messages=[user(*parts)]), 4096).tensors


def sound(rate: int, channels: int, seconds: float = 1.0) -> np.ndarray:
    time = np.arange(int(rate * seconds)) / rate
    wave = 0.3 * np.sin(2 * np.pi * 440 * time)
    return np.stack([wave * (1 + 0.5 * channel) for channel in range(channels)], axis=1)


def encoded(samples: np.ndarray, rate: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind)
    return buffer.getvalue()


def data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3", "OGG"])
@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 2), (48000, 1)])
def test_recordings_in_any_format(kind: str, rate: int, channels: int, front_end: FrontEnd) -> None:
    """440 Hz stays 440 Hz and a second stays a second; both channels count."""
    mean = sound(16000, channels).mean(axis=1)
    plain = tensors(front_end, {"type": "audio", "audio": mean, "rate": 16000})
    read = tensors(front_end, {"type": "audio", "audio": encoded(sound(rate, channels), rate, kind)})
    assert abs(int(read["audio_lengths"]) - 100) <= (12 if kind == "MP3" else 0)  # mp3 has a run-in
    middle, expected = read["audio_features"][:, 40:60].mean(1), plain["audio_features"][:, 40:60].mean(1)
    assert middle.argmax() == expected.argmax()
    assert abs(middle.max() - expected.max()) < 0.02


def test_ways_to_send_a_recording(front_end: FrontEnd, tmp_path: Path) -> None:
    samples = (sound(16000, 1)[:, 0] * 32767).astype(np.int16)
    content = encoded(samples, 16000, "WAV")
    (tmp_path / "a.wav").write_bytes(content)
    text = base64.b64encode(content).decode()
    parts = [
        {"type": "audio", "audio": tmp_path / "a.wav"},
        {"type": "audio", "audio": str(tmp_path / "a.wav")},
        {"type": "audio", "audio": content},
        {"type": "audio", "audio": samples, "rate": 16000},
        {"type": "audio_url", "audio_url": {"url": (tmp_path / "a.wav").as_uri()}},
        {"type": "audio_url", "audio_url": data_url(content, "audio/wav")},
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    ]
    first, *others = [tensors(front_end, part)["audio_features"] for part in parts]
    assert all(torch.equal(first, other) for other in others)


def test_ways_to_send_a_picture(front_end: FrontEnd, tmp_path: Path) -> None:
    pixels = picture(120, 80, 1)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    parts = [
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image", "image": Image.fromarray(pixels)},
        {"type": "image", "image": pixels},
        {"type": "image", "image": content},
        {"type": "image_url", "image_url": {"url": data_url(content, "image/png")}},
    ]
    first, *others = [tensors(front_end, part)["image_pixels"] for part in parts]
    assert all(torch.equal(first, other) for other in others)


def test_transparent_and_rotated_pictures(front_end: FrontEnd) -> None:
    """Transparent parts are white; a camera's orientation mark is followed."""
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert torch.equal(tensors(front_end, {"type": "image", "image": clear})["image_pixels"], torch.ones(16, 1536))
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(picture(128, 64, 2)).save(buffer, format="JPEG", exif=exif)
    assert tensors(front_end, {"type": "image", "image": buffer.getvalue()})["image_grid"].tolist() == [[1, 8, 4]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_sampled_in_time(kind: str, front_end: FrontEnd) -> None:
    """Four colours for 250 ms each: two frames a second take the first and the third, four take all."""
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]
    frames = [Image.new("RGB", (416, 320), colour) for colour in colours]
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(buffer, format=kind, save_all=True, append_images=frames[1:], duration=250, **options)
    animated = {"type": "video", "video": buffer.getvalue()}
    two = tensors(front_end, animated)
    listed = tensors(front_end, {"type": "video", "video": [frames[0], frames[2]]})
    assert torch.equal(two["video_grid"], listed["video_grid"])
    torch.testing.assert_close(two["video_pixels"], listed["video_pixels"], rtol=0, atol=0.02)
    assert tensors(front_end, {**animated, "fps": 4})["video_grid"].tolist() == [[2, 20, 26]]


def test_prompt_limit_counts_media(front_end: FrontEnd) -> None:
    request = Request(id="r", messages=[user({"type": "image", "image": picture(640, 640, 1)}, "Big?")])
    tokens = front_end.prepare(request, 4096).tokens
    assert front_end.prepare(request, tokens).tokens == tokens
    with pytest.raises(RequestError, match=f"^messages: the prompt has {tokens} tokens and the limit is {tokens - 1}"):
        front_end.prepare(request, tokens - 1)


SOUND = sound(16000, 1)[:, 0]
CONTENT = "messages\\[0\\].content"
WRONG: dict[str, tuple[Any, str]] = {
    "no messages": ([], "messages: there are none"),
    "messages of a wrong type": ("Hello", "messages: expected a list"),
    "message of a wrong type": (["Hello"], r"messages\[0\]: expected"),
    "no role": ([{"content": "Hello"}], r"messages\[0\].role: unknown role None"),
    "unknown role": ([user("a"), {"role": "robot", "content": "b"}], r"messages\[1\].role: unknown role 'robot'"),
    "no content": ([{"role": "user"}], f"{CONTENT}: the message is empty"),
    "empty text": ([user("")], f"{CONTENT}: the message is empty"),
    "white space": ([user(" \n")], f"{CONTENT}: the message is empty"),
    "empty parts": ([{"role": "user", "content": [{"type": "text", "text": ""}]}], f"{CONTENT}: the message is empty"),
    "no parts": ([{"role": "user", "content": []}], f"{CONTENT}: the message is empty"),
    "content of a wrong type": ([{"role": "user", "content": 7}], f"{CONTENT}: expected a text or a list"),
    "part of a wrong type": ([{"role": "user", "content": ["a"]}], rf"{CONTENT}\[0\]: expected"),
    "unknown key": (
        [{"role": "user", "content": "a", "tool_calls": [1]}],
        r"messages\[0\].tool_calls: is not supported",
    ),
    "half a surrogate": ([user("a\ud800")], f"{CONTENT}: contains half of a surrogate pair"),
    "unknown part": ([user({"type": "smell"})], rf"{CONTENT}\[0\].type: unknown part type 'smell'"),
    "text missing": ([user({"type": "text"})], rf"{CONTENT}\[0\].text: expected a text"),
    "audio missing": ([user({"type": "audio"})], rf"{CONTENT}\[0\].audio: is missing"),
    "media from the system": (
        [{"role": "system", "content": [{"type": "image", "image": "a.png"}]}],
        rf"{CONTENT}\[0\]: image belongs into user messages",
    ),
    "unknown option": (
        [user({"type": "image", "image": "a.png", "fps": 2})],
        rf"{CONTENT}\[0\].fps: is not supported with image",
    ),
    "no such file": (
        [user({"type": "audio", "audio": "/no/such.wav"})],
        rf"{CONTENT}\[0\].audio: cannot be read as audio",
    ),
    "no such picture": ([user({"type": "image", "image": "/no/such.png"})], rf"{CONTENT}\[0\].image: cannot be read"),
    "a folder": ([user({"type": "image", "image": "/"})], rf"{CONTENT}\[0\].image: cannot be read"),
    "remote address": (
        [user({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}})],
        rf"{CONTENT}\[0\].image_url: remote addresses are not fetched",
    ),
    "broken data URL": (
        [user({"type": "audio_url", "audio_url": "data:audio/wav,abc"})],
        rf"{CONTENT}\[0\].audio_url: expected a data URL",
    ),
    "broken base64": (
        [user({"type": "image_url", "image_url": "data:image/png;base64,?"})],
        rf"{CONTENT}\[0\].image_url: is not valid base64",
    ),
    "unknown format": (
        [user({"type": "input_audio", "input_audio": {"data": "", "format": "aiff"}})],
        rf"{CONTENT}\[0\].input_audio.format: unknown format 'aiff'",
    ),
    "input_audio without data": (
        [user({"type": "input_audio", "input_audio": "abc"})],
        rf"{CONTENT}\[0\].input_audio: expected",
    ),
    "not audio": (
        [user({"type": "audio", "audio": b"RIFFnothing"})],
        rf"{CONTENT}\[0\].audio: cannot be read as audio",
    ),
    "empty file": ([user({"type": "audio", "audio": b""})], rf"{CONTENT}\[0\].audio: cannot be read as audio"),
    "truncated picture": (
        [user({"type": "image", "image": b"\x89PNG\r\n\x1a\nabc"})],
        rf"{CONTENT}\[0\].image: cannot be read as an image",
    ),
    "no samples": ([user({"type": "audio", "audio": SOUND[:0], "rate": 16000})], rf"{CONTENT}\[0\].audio: is 0.000 s"),
    "too short": ([user({"type": "audio", "audio": SOUND[:399], "rate": 16000})], rf"{CONTENT}\[0\].audio: is 0.025 s"),
    "too long": (
        [user({"type": "audio", "audio": np.zeros(301 * 8000), "rate": 8000})],
        rf"{CONTENT}\[0\].audio: is 301.0 s long; the limit is 300 s",
    ),
    "no rate": ([user({"type": "audio", "audio": SOUND})], rf"{CONTENT}\[0\].audio: an array needs its 'rate'"),
    "not a number": (
        [user({"type": "audio", "audio": SOUND * np.nan, "rate": 16000})],
        rf"{CONTENT}\[0\].audio: contains values that are not finite",
    ),
    "array of a wrong shape": (
        [user({"type": "audio", "audio": SOUND[None, None], "rate": 16000})],
        rf"{CONTENT}\[0\].audio: expected numbers",
    ),
    "picture of a wrong shape": (
        [user({"type": "image", "image": np.zeros((8, 8))})],
        rf"{CONTENT}\[0\].image: expected a uint8 array",
    ),
    "picture without pixels": (
        [user({"type": "image", "image": np.zeros((0, 8, 3), np.uint8)})],
        rf"{CONTENT}\[0\].image: expected a uint8 array",
    ),
    "picture as a number": ([user({"type": "image", "image": 3})], rf"{CONTENT}\[0\].image: expected a path"),
    "picture too long": (
        [user({"type": "image", "image": np.zeros((4, 900, 3), np.uint8)})],
        rf"{CONTENT}\[0\].image: 900x4 is too long",
    ),
    "no frames": ([user({"type": "video", "video": []})], rf"{CONTENT}\[0\].video: has no frames"),
    "too many frames": (
        [user({"type": "video", "video": [np.zeros((2, 2, 3), np.uint8)] * 800})],
        rf"{CONTENT}\[0\].video: has more than 768 frames",
    ),
    "frames of different sizes": (
        [user({"type": "video", "video": [picture(40, 40, 1), picture(40, 41, 1)]})],
        rf"{CONTENT}\[0\].video: its frames differ in size",
    ),
    "a broken frame": (
        [user({"type": "video", "video": [picture(40, 40, 1), "/no/such.png"]})],
        rf"{CONTENT}\[0\].video\[1\]: cannot be read",
    ),
    "no speed": (
        [user({"type": "video", "video": [picture(40, 40, 1)], "fps": 0})],
        rf"{CONTENT}\[0\].video: fps must be a number from 0.001 to 1000",
    ),
    "not a video": (
        [user({"type": "video", "video": b"abc"})],
        rf"{CONTENT}\[0\].video: cannot be read as an animation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_messages(name: str, front_end: FrontEnd) -> None:
    messages, message = WRONG[name]
    with pytest.raises(RequestError, match=f"^{message}"):
        front_end.prepare(Request(id="r", messages=messages), 4096)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speaker": "bob"}, "^speaker: unknown speaker 'bob'; known: aiden, chelsie, ethan"),
        ({"speaker": 3}, "^speaker: unknown speaker 3"),
        ({"modalities": ()}, "^modalities: expected text, audio or both"),
        ({"modalities": ("text", "image")}, "^modalities: expected text, audio or both"),
        ({"modalities": "text"}, "^modalities: expected text, audio or both"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str, front_end: FrontEnd) -> None:
    with pytest.raises(RequestError, match=message):
        front_end.prepare(Request(id="r", messages=[user("Hello.")], **fields), 4096)
