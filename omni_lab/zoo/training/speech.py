"""What the teacher has read, as files: texts, word times and codes; for the decoder's training waveforms too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omni_lab.zoo.training.codes import Codebooks, noise_pattern
from omni_lab.zoo.training.teacher import PACE, Teacher

SHARD = 500
"""Sentences a file: what a killed run loses at most."""


@dataclass(frozen=True)
class Utterance:
    text: str
    words: np.ndarray
    """Frame in which each word begins, [words]."""
    codes: np.ndarray
    """Informative codes, [T, INFORMATIVE] uint8."""


def features(teacher: Teacher, texts: Iterable[str]) -> np.ndarray:
    """All frames' features, [N, F]."""
    return np.concatenate([teacher.read(text).features for text in texts])


def record(
    folder: Path,
    texts: list[str],
    teacher: Callable[[], Teacher],
    codebooks: Codebooks,
    waves: bool,
    say: Callable[[str], None],
    paces: dict[str, float] | None = None,
) -> None:
    """Read the texts, some at `paces` of their own, into files of `SHARD` sentences; a file that holds them is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(texts), SHARD):
        file = folder / f"{start // SHARD:04}.npz"
        chosen = [(text, (paces or {}).get(text, PACE)) for text in texts[start : start + SHARD]]
        if file.exists() and _held(file)[: len(chosen)] == chosen:
            continue
        arrays = _record(chosen, teacher(), codebooks, waves)
        scratch = file.with_suffix(".tmp")
        with scratch.open("wb") as handle:
            np.savez(handle, **arrays)
        os.replace(scratch, file)
        say(f"{folder.name}: {start + len(chosen)} of {len(texts)} sentences read")


def _held(file: Path) -> list[tuple[str, float]]:
    with np.load(file) as shard:
        return list(zip(shard["texts"].tolist(), shard["paces"].tolist(), strict=True))


def _record(
    chosen: list[tuple[str, float]], teacher: Teacher, codebooks: Codebooks, waves: bool
) -> dict[str, np.ndarray]:
    codes, words, sound = [], [], []
    for text, pace in chosen:
        reading = teacher.read(text, pace)
        codes.append(codebooks.encode(reading.features, reading.pitch))
        words.append(reading.words.astype(np.float32))
        if waves:
            sound.append((teacher.wave(reading, noise_pattern(codes[-1])) * 32767).astype(np.int16))
    arrays = {
        "texts": np.array([text for text, _ in chosen]),
        "paces": np.array([pace for _, pace in chosen]),
        "frames": np.array([len(part) for part in codes]),
        "word_counts": np.array([len(part) for part in words]),
        "codes": np.concatenate(codes),
        "words": np.concatenate(words),
    }
    return arrays | ({"waves": np.concatenate(sound)} if waves else {})


def utterances(folder: Path) -> Iterator[Utterance]:
    """All utterances of a folder."""
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as shard:
            codes = np.split(shard["codes"], shard["frames"].cumsum()[:-1])
            words = np.split(shard["words"], shard["word_counts"].cumsum()[:-1])
            yield from map(Utterance, shard["texts"].tolist(), words, codes)


def waveforms(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Everything that a folder of recordings holds, end to end.

    Returns (codes [N, INFORMATIVE], samples [N * FRAME] int16, first frame of each utterance).
    """
    codes, waves, frames = [], [], []
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as shard:
            codes.append(shard["codes"])
            waves.append(shard["waves"])
            frames.append(shard["frames"])
    starts = np.concatenate([[0], np.concatenate(frames).cumsum()[:-1]])
    return np.concatenate(codes), np.concatenate(waves), starts
