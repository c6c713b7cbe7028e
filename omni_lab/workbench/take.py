"""One recorded answer with everything a listener needs: samples, when they arrived, what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from omni_lab.frames import Run
from omni_lab.quality.recordings import kept, recording
from omni_lab.views.figures import load_label
from omni_lab.views.tables import MISSING, NUMBER
from omni_lab.views.tables import text as in_words
from omni_lab.views.theme import style

FACTS = {
    "first audio": ("audio_ttfp_ms", " ms"),
    "RTF": ("audio_rtf", ""),
    "underrun": ("audio_underrun_s", " s"),
}
"""What a player shows beside a take: label, column of requests, unit."""


@dataclass(eq=False)
class Take:
    """One answer in speech. Takes of one player are usually the same sentence from several configurations.

    `samples` [n]: mono, full scale 1. `arrivals_ms`: when each chunk reached the client, since the request was sent;
    empty if nobody recorded it. `chunk_samples`, `chunk_frames`: samples and codec frames of each chunk; no
    `chunk_samples` mean one chunk. `facts`: figures to show beside it, as text. `color`: of its waveform; a player
    chooses one where there is none. Raises ValueError where these do not fit together.
    """

    label: str
    samples: np.ndarray
    sample_rate: int
    arrivals_ms: list[float] = field(default_factory=list)
    chunk_samples: list[int] = field(default_factory=list)
    text: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    chunk_frames: list[int] = field(default_factory=list)
    color: str = ""

    def __post_init__(self) -> None:
        self.samples = np.ascontiguousarray(self.samples, np.float32)
        self.sample_rate = int(self.sample_rate)
        self.arrivals_ms = [float(time) for time in self.arrivals_ms]
        self.chunk_samples = [int(count) for count in self.chunk_samples] or [len(self.samples)]
        self.chunk_frames = [int(count) for count in self.chunk_frames]
        if self.samples.ndim != 1:
            raise ValueError(f"take {self.label!r}: samples: expected mono [n], found shape {self.samples.shape}")
        for name in ("samples", "arrivals_ms"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"take {self.label!r}: {name}: expected finite numbers, found NaN or infinity")
        if not self.sample_rate > 0:
            raise ValueError(f"take {self.label!r}: sample_rate: expected Hz above 0, found {self.sample_rate}")
        if sum(self.chunk_samples) != len(self.samples):
            expected = f"{len(self.samples)} together, found {sum(self.chunk_samples)}"
            raise ValueError(f"take {self.label!r}: chunk_samples: expected {expected}")
        for name in ("arrivals_ms", "chunk_frames"):
            values = getattr(self, name)
            if values and len(values) != len(self.chunk_samples):
                expected = f"one for each of {len(self.chunk_samples)} chunks, found {len(values)}"
                raise ValueError(f"take {self.label!r}: {name}: expected none or {expected}")

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate


def takes(
    run: Run,
    prompt: str | None = None,
    configurations: Sequence[str] | None = None,
    concurrency: int | None = None,
) -> list[Take]:
    """The same sentence from each configuration and concurrency of a run, in the run's order; the first repeat kept.

    `prompt`: a prompt's name or its sentence; left out, the one that most cells have kept, or the first answer where
    prompts have no names. An empty list if the run has kept no audio (`results.save_audio`). Raises ValueError if the
    run lacks what is asked for or a recording cannot be read, FileNotFoundError if one that requests.jsonl names is
    gone.
    """
    rows = kept(run)
    if rows.empty:
        return []
    rows = rows.reindex(columns=rows.columns.union(["prompt", "target_text"], sort=False))  # older runs lack them
    if configurations is not None:
        for name in configurations:
            _expect("configuration", name, rows["configuration"])
        rows = rows[rows["configuration"].isin(configurations)]
    if concurrency is not None:
        _expect("concurrency", concurrency, rows["concurrency"])
        rows = rows[rows["concurrency"] == concurrency]
    if prompt is not None:
        _expect("prompt", prompt, rows["prompt"], rows["target_text"])
        rows = rows[(rows["prompt"] == prompt) | (rows["target_text"] == prompt)]
    elif len(rows):
        cells = rows.drop_duplicates(["configuration", "concurrency", "prompt"])
        often = cells["prompt"].value_counts(sort=False)
        rows = rows[rows["prompt"] == often.idxmax()] if len(often) else rows[rows["text"] == rows["text"].iloc[0]]
    rows = rows.sort_values("repeat", kind="stable").drop_duplicates(["configuration", "concurrency"])
    rows = rows.sort_values(["configuration", "concurrency"])
    several = rows["concurrency"].nunique(dropna=False) > 1
    return [take_of(run, row, several) for _, row in rows.iterrows()]


def take_of(run: Run, request: pd.Series, with_load: bool = True) -> Take:
    """The recording of one row of `run.requests`, labelled by its configuration, and by its load if `with_load`.

    Raises ValueError if the run kept no audio of it, FileNotFoundError if the file is gone.
    """
    if not isinstance(request.get("audio_file"), str):
        raise ValueError(f"request {request['id']}: no audio was kept; run with results.save_audio larger")
    found = recording(run, request)
    load = f", {load_label(request['concurrency'])} in flight" if with_load else ""
    return Take(
        label=f"{request['configuration']}{load}",
        samples=found.samples,
        sample_rate=found.rate,
        arrivals_ms=_values(request, "audio_times_ms"),
        chunk_samples=_values(request, "audio_chunk_samples"),
        text=text if isinstance(text := request.get("text"), str) else "",
        facts=facts(request),
        chunk_frames=_values(request, "audio_chunk_frames"),
        color=style(run.requests["configuration"])[request["configuration"]]["color"],
    )


def facts(request: Mapping[str, Any]) -> dict[str, str]:
    """The FACTS of an answer, without those that were not measured."""
    shown = {label: in_words(request.get(column), NUMBER, unit=unit) for label, (column, unit) in FACTS.items()}
    return {label: value for label, value in shown.items() if value != MISSING}


def _values(request: pd.Series, column: str) -> list:
    found = request.get(column)
    return found if isinstance(found, list) else []


def _expect(what: str, wanted: str | int, *columns: pd.Series) -> None:
    """Raises ValueError if none of the columns has the wanted value, and says what there is."""
    if not any((column == wanted).any() for column in columns):
        there = ", ".join(map(str, columns[0].drop_duplicates()))
        raise ValueError(f"{what} {wanted!r}: the run kept no audio of it, only of {there}")
