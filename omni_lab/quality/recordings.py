"""The recordings that a run kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import soundfile

from omni_lab.frames import Run


@dataclass(frozen=True, slots=True)
class Recording:
    """The audio of one request: mono samples of full scale 1, and where each chunk but the first begins."""

    samples: np.ndarray
    rate: int
    edges: np.ndarray

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def kept(run: Run) -> pd.DataFrame:
    """The rows of `run.requests` whose audio was kept."""
    if "audio_file" not in run.requests:
        return run.requests.iloc[:0]
    return run.requests[run.requests["audio_file"].notna()]


def recordings(run: Run) -> Iterator[tuple[pd.Series, Recording]]:
    """Each kept request with its audio, in the order of `run.requests`.

    Raises FileNotFoundError or ValueError, naming the file, where requests.jsonl names one that cannot be read.
    """
    return ((row, recording(run, row)) for _, row in kept(run).iterrows())


def recording(run: Run, row: pd.Series) -> Recording:
    """The audio of one kept request. Raises as `recordings`."""
    file = recorded_file(run, row)
    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise ValueError(f"{file}: expected a readable audio file: {error}") from error
    chunks = row.get("audio_chunk_samples")
    edges = np.cumsum(chunks)[:-1] if isinstance(chunks, list) else np.zeros(0, int)
    return Recording(samples.mean(axis=1), rate, edges)


def recorded_file(run: Run, row: pd.Series) -> Path:
    """Where the audio of a kept request is. Raises FileNotFoundError if it is gone."""
    file = run.path / row["audio_file"]
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file, but requests.jsonl names it for request {row['id']}")
    return file
