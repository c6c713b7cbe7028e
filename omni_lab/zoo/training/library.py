"""Utterances ready to train on: tokenized, timed, sorted by length, drawn in batches of like length."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from omni_lab.zoo.training import speech, timing

REPERTOIRE_SHARE = 1 / 3
"""Of the batches of utterances: sentences that have to be right, not only likely."""
LAST, LAST_SHARE = 0.05, 3 / 4
"""The last part of a training, and the share in it."""


def repertoire_share(progress: float) -> float:
    """The share when `progress` (0 to 1) of the training is done."""
    return LAST_SHARE if progress > 1 - LAST else REPERTOIRE_SHARE


@dataclass(frozen=True)
class Lesson:
    text: str
    words: list[list[int]]
    """Timed token ids of each word."""
    codes: np.ndarray
    """[T, INFORMATIVE] uint8."""

    @property
    def answer(self) -> list[int]:
        """Timed token ids."""
        return list(chain.from_iterable(self.words))


class Library:
    """All lessons in memory: the repertoire, and everything else."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.repertoire = self._read(folder / "repertoire")
        self.others = self._read(folder / "sentences")
        self.quoted = [lesson for lesson in self.others if len(lesson.words) > 2]

    def _read(self, folder: Path) -> list[Lesson]:
        lessons = []
        for utterance in speech.utterances(folder):
            encoding = self.tokenizer.encode(utterance.text)
            words = timing.timed(utterance.text, encoding, utterance.words)
            lessons.append(Lesson(utterance.text, words, utterance.codes))
        return sorted(lessons, key=lambda lesson: len(lesson.codes))

    def draw(self, chance: np.random.Generator, progress: float, frames: int) -> list[Lesson]:
        """Neighbours in length that have about `frames` frames together."""
        shelf = self.repertoire if chance.random() < repertoire_share(progress) else self.others
        lesson = int(chance.integers(len(shelf)))
        batch: list[Lesson] = []
        while sum(len(member.codes) for member in batch) < frames and lesson < len(shelf):
            batch.append(shelf[lesson])
            lesson += int(chance.integers(1, 4))
        return batch

    def collage(self, chance: np.random.Generator) -> tuple[str, list[int]]:
        """A text that nobody has read, with its timed token ids: up to 16 words out of as many lessons.

        Its first word began a lesson and its last word ended one.
        """
        texts, answer = [], []
        count = int(chance.integers(2, 17))
        for place in range(count):
            lesson = self.quoted[int(chance.integers(len(self.quoted)))]
            inside = int(chance.integers(1, len(lesson.words) - 1))
            word = 0 if place == 0 else len(lesson.words) - 1 if place == count - 1 else inside
            texts.append(lesson.text.split(" ")[word])
            answer += lesson.words[word]
        return " ".join(texts), answer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids
