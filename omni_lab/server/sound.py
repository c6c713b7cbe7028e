"""Samples to bytes: PCM, and files of each format."""

from __future__ import annotations

import io
import struct

import numpy as np

from omni_lab.metrics.definitions import SAMPLE_RATE

FILES = {
    "wav": ("WAV", "PCM_16", "audio/wav"),
    "flac": ("FLAC", "PCM_16", "audio/flac"),
    "mp3": ("MP3", "MPEG_LAYER_III", "audio/mpeg"),
    "opus": ("OGG", "OPUS", "audio/ogg"),
}
"""Format and encoding in libsndfile, and the media type."""

UNKNOWN_LENGTH = 0xFFFFFFFF


def pcm16(samples: np.ndarray) -> bytes:
    """Signed 16-bit little-endian samples out of floats in [-1, 1]; louder ones are clipped."""
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes()


def wav_header(size: int = UNKNOWN_LENGTH) -> bytes:
    """The 44 bytes before `size` bytes of 16-bit samples; in a stream, where nobody knows their number, the largest."""
    riff = min(size + 36, UNKNOWN_LENGTH)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SAMPLE_RATE, SAMPLE_RATE * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + form + struct.pack("<4sI", b"data", size)


def encode(samples: np.ndarray, form: str) -> bytes:
    """A complete file of a format of FILES, or bare PCM ("pcm", "pcm16")."""
    if form in ("pcm", "pcm16"):
        return pcm16(samples)
    if form == "wav":
        data = pcm16(samples)
        return wav_header(len(data)) + data
    import soundfile

    container, encoding, _ = FILES[form]
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, encoding, format=container)
    return file.getvalue()


def media_type(form: str) -> str:
    return FILES[form][2] if form in FILES else f"audio/pcm;rate={SAMPLE_RATE};channels=1"
