"""A run's audio as a table: a row a request whose audio was kept."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from omni_lab.frames import QUALITY, Run, load
from omni_lab.quality.clicks import clicks
from omni_lab.quality.ear import Ear
from omni_lab.quality.loudness import clipped, loudness, true_peak
from omni_lab.quality.recordings import Recording, kept, recordings
from omni_lab.quality.silence import silence
from omni_lab.quality.words import DEFINITIONS, count

FILE = "quality.parquet"
"""Where `write` leaves what was heard, in the run directory; `omni_lab.load` reads it as `run.quality`."""


def measure(run: Run | str | Path) -> pd.DataFrame:
    """What a signal tells without understanding it: loudness, peak, clicks, silence, and which samples are equal.

    A row for each request whose audio was kept, with the columns of `frames.QUALITY` (docs/quality.md says what each
    is); those about words are empty. Some ms a recording; needs no extra. Raises what `omni_lab.load` raises, and
    FileNotFoundError or ValueError for a recording that cannot be read.
    """
    run = run if isinstance(run, Run) else load(run)
    first: dict[Any, tuple[str, Recording]] = {}
    rows = []
    for row, recording in recordings(run):
        prompt = row.get("prompt")
        key = (prompt if isinstance(prompt, str) else row.get("text"), row.get("index"))
        if not rows or row["configuration"] == rows[0]["configuration"]:
            first.setdefault(key, (row["id"], recording))
        rows.append(_signal(row, recording) | _compared(row["id"], recording, *first.get(key, (None, None))))
    found = pd.DataFrame(rows, columns=None if rows else QUALITY).reindex(columns=QUALITY)
    return found.astype({"configuration": run.requests["configuration"].dtype})


def hear(run: Run | str | Path, definition: str = "whisper", bar: bool = True) -> pd.DataFrame:
    """`measure`, and the words: what whisper tiny.en heard in each recording, and its errors against the reference.

    The reference is the text that was to be spoken, or, where the prompt does not say, the text of the answer.
    `definition` is one of `DEFINITIONS`; `bar` shows progress. About half a second a recording; equal recordings are
    heard once. Raises what `measure` raises, ValueError for an unknown definition, and ImportError without the extra
    [quality].
    """
    if definition not in DEFINITIONS:
        raise ValueError(f"definition: expected one of {', '.join(DEFINITIONS)}, got {definition!r}")
    run = run if isinstance(run, Run) else load(run)
    found, ear, known = measure(run), Ear(), {}
    words = []
    for place, (_, recording) in enumerate(
        tqdm(recordings(run), total=len(found), desc="hearing", disable=not bar, leave=False)
    ):
        key = hashlib.sha256(recording.samples.tobytes()).digest()
        if key not in known:
            known[key] = ear.hear(recording.samples, recording.rate)
        counts = count(DEFINITIONS[definition], found["reference"].iloc[place], known[key])
        words.append({"heard": known[key], **asdict(counts), "definition": definition})
    return found.assign(**pd.DataFrame(words, index=found.index)) if words else found


def write(run: Run, heard: pd.DataFrame) -> Path:
    """Keeps what was heard in the run directory; the file's path."""
    scratch = run.path / f".{FILE}"
    heard.to_parquet(scratch, index=False)
    os.replace(scratch, run.path / FILE)
    return run.path / FILE


def current(run: Run) -> pd.DataFrame:
    """What was heard if it was kept and is of these recordings, else what can be measured now, without words."""
    if len(run.quality) and list(run.quality["id"].sort_values()) == list(kept(run)["id"].sort_values()):
        return run.quality
    return measure(run)


def _signal(row: pd.Series, recording: Recording) -> dict[str, Any]:
    samples, rate = recording.samples, recording.rate
    said = (row.get(name) for name in ("target_text", "text"))
    reference = next((text for text in said if isinstance(text, str)), "")
    quiet, edges = silence(samples, rate), clicks(samples, rate, recording.edges)
    speaking = recording.seconds - quiet.leading - quiet.trailing
    return {
        **{name: row.get(name) for name in ("id", "configuration", "concurrency", "repeat", "prompt", "index")},
        "reference": reference,
        "duration_s": recording.seconds,
        "loudness_lufs": loudness(samples, rate),
        "peak_dbtp": true_peak(samples, rate),
        "clipped_samples": clipped(samples),
        "edges": edges.edges,
        "edge_worst_db": edges.worst_db,
        "edge_percentile": edges.percentile,
        "clicks": edges.clicks,
        "leading_silence_s": quiet.leading,
        "trailing_silence_s": quiet.trailing,
        "longest_pause_s": quiet.longest,
        "words_per_s": len(reference.split()) / speaking if speaking > 0 else math.nan,
    }


def _compared(own: str, recording: Recording, name: str | None, other: Recording | None) -> dict[str, Any]:
    """How far the samples are from the first configuration's for the same request; nothing for these themselves."""
    if other is None or own == name:
        return {}
    lengths = len(recording.samples), len(other.samples)
    common = min(lengths)
    apart = np.abs(recording.samples[:common] - other.samples[:common]).max(initial=0.0)
    return {
        "compared_with": name,
        "length_difference": lengths[0] - lengths[1],
        "max_deviation": float(apart),
        "compared_edge_percentile": clicks(other.samples, other.rate, recording.edges).percentile,
    }
