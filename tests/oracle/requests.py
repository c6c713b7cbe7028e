"""The oracle's requests: chats with text, recordings, pictures and clips, all made by the code below.

Every request is greedy. `wave` says whether the fixture keeps its waveform; frames and text tokens are capped by
the sampling's `max_tokens` (n sampled codec tokens give n - 1 frames).
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from omni_lab.core import Request, Sampling

SYSTEM = "You are a helpful voice assistant."
Part = dict[str, Any]


@dataclass(frozen=True)
class OracleRequest:
    request: Request
    wave: bool


def user(*parts: str | Part) -> dict[str, Any]:
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tone(samples: int, step: float, seed: int) -> np.ndarray:
    """A gliding tone with noise at 16 kHz, in whole 16-bit steps so that a wav file keeps it exactly."""
    time = np.arange(samples)
    noise = np.random.RandomState(seed).randint(-2000, 2000, samples)
    return ((12000 * np.sin(step * time * (1 + time / samples)) + noise).astype(np.int16) / 32768).astype(np.float32)


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """A colour gradient with noise, uint8 [height, width, 3]."""
    rows, columns = np.mgrid[0:height, 0:width]
    gradient = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    noise = np.random.RandomState(seed).randint(-40, 40, gradient.shape)
    return np.clip(gradient + noise, 0, 255).astype(np.uint8)


def audio_array(samples: np.ndarray) -> Part:
    return {"type": "audio", "audio": samples, "rate": 16000}


def audio_file(samples: np.ndarray) -> Part:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16000, format="WAV", subtype="PCM_16")
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"},
    }


def image_array(pixels: np.ndarray) -> Part:
    return {"type": "image", "image": pixels}


def image_url(pixels: np.ndarray) -> Part:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"},
    }


def clip(frames: int, width: int, height: int, seed: int, **options: float) -> Part:
    return {"type": "video", "video": [picture(width, height, seed + index) for index in range(frames)], **options}


def oracle_requests() -> list[OracleRequest]:
    """All of them, in the order of the fixture."""
    requests: list[OracleRequest] = []

    def add(
        name: str,
        *messages: dict[str, Any],
        text: int = 12,
        frames: int = 8,
        least_text: int = 0,
        least_frames: int = 0,
        speaker: str | None = None,
        wave: bool = False,
    ) -> None:
        sampling = {
            "thinker": Sampling(min_tokens=least_text, max_tokens=text),
            "talker": Sampling(min_tokens=least_frames, max_tokens=frames + 1, repetition_penalty=1.05),
        }
        request = Request(id=name, messages=list(messages), speaker=speaker, sampling=sampling, return_codes=True)
        requests.append(OracleRequest(request, wave))

    long_text = " ".join(
        f"Line {number}: the quick brown fox jumps over {number * 7} lazy dogs." for number in range(60)
    )
    weather = user("What is the weather like today?")

    # Text, one turn.
    add("text_plain", weather, wave=True)
    add("text_system", system(), user("Please read: Good morning."), frames=20, wave=True)
    add("text_two_tokens", user("Hello."), text=2, frames=16, wave=True)
    add("text_three_tokens", user("Hello again."), text=3, frames=6)
    add("text_one_frame", user("One frame only."), frames=1, wave=True)
    add("text_two_frames", user("Two frames only."), frames=2, wave=True)
    add("text_one_character", user("a"), frames=10)
    add("text_long_answer", system(), user("Tell me a long story."), text=256, frames=8)
    add("text_long_prompt", system(), user(long_text), text=10, frames=8)
    add("text_many_frames", system(), user("The third one turns the numbers into sound."), text=40, frames=100)
    add("text_speech_outlasts_text", user("Once upon a time."), text=4, frames=60)
    add("text_unicode", user("Grüße aus Köln — 12 °C, naïve café, 東京, 🙂👍🏽."), text=16, frames=12)
    add("text_code", user("def f(x):\n\treturn {'a': x**2}  # <b>&amp;</b>\n\n"), text=16, frames=12)
    add("text_white_space", system("  Be brief.\n"), user("  \n two  spaces and a line end \n"), text=10, frames=10)
    add("speaker_chelsie", weather, speaker="chelsie", wave=True)
    add("speaker_aiden", weather, speaker="Aiden")

    # Where the model itself ends text or speech.
    add("text_ends", user("door first"), text=60, frames=24, wave=True)
    add("text_ends_soon", user("leads words,"), text=60, frames=12)
    add("text_ends_later", user("room it"), text=60, frames=40, wave=True)
    add("text_must_go_on", user("door first"), text=24, least_text=18, frames=10)
    for name, words in SPEECH_ENDS.items():
        add(name, user(words), text=40, frames=120, wave=name == "speech_ends")
    add("speech_must_go_on", user(next(iter(SPEECH_ENDS.values()))), text=40, frames=30, least_frames=16)

    # Several turns: all user turns reach the Talker, the others do not.
    turns = (user("My name is Ann."), assistant("Hello Ann, how can I help?"), user("What is my name?"))
    add("turns_two", *turns, frames=16, wave=True)
    add("turns_three", system(), *turns, assistant("Your name is Ann."), user("Say it again, please."), frames=12)

    # Recordings.
    add("audio_half_second", user(audio_array(tone(8000, 0.05, 1)), "What do you hear?"), wave=True)
    add("audio_then_nothing", system(), user(audio_file(tone(16123, 0.11, 2))), frames=16)
    add("audio_long", user("Listen: ", audio_file(tone(160000, 0.02, 3)), " and answer."), text=16, frames=12)
    add("audio_two", user(audio_array(tone(20050, 0.2, 4)), "or", audio_array(tone(9001, 0.07, 5)), "?"), frames=12)
    add("audio_turns", user(audio_array(tone(12000, 0.3, 6))), assistant("A tone."), user("How high?"), frames=10)

    # Pictures.
    add("image_exact", user(image_array(picture(128, 96, 1)), "What do you see?"), wave=True)
    add("image_resized", system(), user("Describe ", image_url(picture(205, 83, 2)), "."), frames=16)
    add("image_tiny", user(image_array(picture(20, 31, 3)), "Too small?"), frames=8)
    add("image_two", user(image_array(picture(96, 64, 4)), image_array(picture(64, 160, 5)), "Compare."), frames=12)
    turns = (user(image_url(picture(70, 70, 6)), "Look."), assistant("I see."), user(image_array(picture(64, 64, 7))))
    add("image_turns", system(), *turns, frames=10)

    # Clips.
    add("video_pairs", user(clip(4, 416, 320, 1), "What happens?"), frames=12, wave=True)
    add("video_odd", system(), user(clip(3, 416, 320, 5, fps=1), "And now?"), frames=8)
    add("video_between_positions", user(clip(6, 384, 352, 9, fps=3), "How fast?"), text=16, frames=16, wave=True)

    # Everything together.
    add(
        "audio_image",
        user(audio_array(tone(11000, 0.09, 7)), image_array(picture(96, 96, 8)), "Both."),
        frames=16,
        wave=True,
    )
    add(
        "image_audio_turns",
        user(image_array(picture(80, 64, 9))),
        assistant("A picture."),
        user(audio_file(tone(7000, 0.4, 8))),
        frames=10,
    )
    media = (clip(2, 416, 320, 11), audio_array(tone(9600, 0.15, 9)), image_array(picture(64, 96, 10)))
    add("video_audio_image", system(), user(*media, "All three."), text=16, frames=16)
    return requests


SPEECH_ENDS = {
    "speech_ends": "in he looked your five, brother same the",
    "speech_ends_later": "what walks rue. what rain engine, it. talk.",
    "speech_ends_late": "Thank open Bahnhof, El You",
}
"""Texts after which `nano` ends its speech by itself."""
