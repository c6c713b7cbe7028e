"""Word error rates, each with the definition that belongs beside the number."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from omni_lab.quality.extra import of_quality


@dataclass(frozen=True, slots=True)
class Definition:
    """How two texts are made comparable, and how the errors of many sentences become one rate."""

    name: str
    says: str
    """The definition in a sentence, to be printed beside the number."""
    normalize: Callable[[str], str]
    pooled: bool = True
    """All errors over all words; False: the mean of the sentences' own rates."""

    def rate(self, errors: np.ndarray, words: np.ndarray, weights: np.ndarray | None = None) -> Any:
        """The rate over sentences; with `weights` (..., sentences), one for each of these weightings."""
        weights = np.ones(len(words)) if weights is None else weights
        if self.pooled:
            return weights @ errors / (weights @ words)
        return weights @ (errors / words) / weights.sum(axis=-1)


@dataclass(frozen=True, slots=True)
class Counts:
    """Substitutions, deletions and insertions, and how much the reference holds, in words and in characters."""

    errors: int
    words: int
    character_errors: int
    characters: int


def count(definition: Definition, reference: str, heard: str) -> Counts:
    """Compares what was heard with what should be; spaces count as characters.

    A reference without a word has 0 words, and what was heard counts as insertions. Raises ImportError without the
    extra [quality].
    """
    with of_quality():
        import jiwer

    reference, heard = definition.normalize(reference), definition.normalize(heard)
    if not reference.strip():
        return Counts(len(heard.split()), 0, len(heard.strip()), 0)
    words, characters = jiwer.process_words(reference, heard), jiwer.process_characters(reference, heard)
    return Counts(
        words.substitutions + words.deletions + words.insertions,
        words.hits + words.substitutions + words.deletions,
        characters.substitutions + characters.deletions + characters.insertions,
        characters.hits + characters.substitutions + characters.deletions,
    )


@cache
def _english() -> Callable[[str], str]:
    with of_quality():
        from whisper_normalizer.english import EnglishTextNormalizer

    return EnglishTextNormalizer()


def _whisper(text: str) -> str:
    return _english()(text)


def _spelled(text: str) -> str:
    """ "b 7 2", "B72" and "b-7-2" are one word, as are "7.30" and "730", or "12 and a half" and "twelve and a half"."""
    halves = re.sub(r"(\d)\W+and a half\b", r"\1.5", text, flags=re.IGNORECASE)
    plain = " ".join(re.sub(r"(?<=\d)[.:](?=\d\d)", "", _whisper(halves)).split())
    return re.sub(r"(?<=\b\w) (?=\w\b)|(?<=\d) (?=\d)|(?<=\b[a-z]) (?=\d)|(?<=\d) (?=[a-z]\b)", "", plain)


def _seed_tts(text: str) -> str:
    kept = "".join(one for one in text if one == "'" or not _is_punctuation(one))
    return kept.replace("  ", " ").lower()


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


WHISPER = Definition(
    "whisper",
    "substitutions, deletions and insertions of all sentences / words of all references, after whisper's English "
    "normalizer (whisper-normalizer, jiwer)",
    _whisper,
)
SPELLED = Definition(
    "spelled",
    f"{WHISPER.says}, with letters and digits that stand alone written together on both sides (b 7 2 as b72), "
    "and halves behind digits as decimals (12 and a half as 12.5)",
    _spelled,
)
SEED_TTS = Definition(
    "seed-tts",
    "mean of the sentences' own rates, in lower case and without punctuation but the apostrophe, as Seed-TTS-eval "
    "defines it (run_wer.py and average_wer.py of BytedanceSpeech/seed-tts-eval); that hears with whisper-large-v3",
    _seed_tts,
    pooled=False,
)

DEFINITIONS = {one.name: one for one in (WHISPER, SPELLED, SEED_TTS)}
