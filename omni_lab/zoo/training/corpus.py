"""What is read: the bundled sentences, the grammar, and common English words in random order.

Random words teach spelling: how the letters of a word sound, whatever stands beside it.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from omni_lab import zoo
from omni_lab.zoo.training import grammar

GRAMMAR_SHARE = 0.6
COMMON_WORDS = 12000
SHORT_WORDS = re.compile("a|i|an|as|at|be|by|do|go|he|if|in|is|it|me|my|no|of|on|or|so|to|up|us|we|am")


def repertoire() -> list[str]:
    """The sentences that come with the package."""
    return _texts(zoo.bundled_set())


def training_sentences(count: int, seed: int) -> list[str]:
    """Different sentences of grammar and random words; none of the repertoire and none that is held out."""
    chance = random.Random(seed)
    words = _common_words()
    found: dict[str, None] = {}
    while len(found) < count:
        found[grammar.sentence(chance) if chance.random() < GRAMMAR_SHARE else _random_words(words, chance)] = None
    return list(found)


def open_english() -> list[str]:
    """Fifty sentences on varied topics, written for measuring; nothing of them is trained on."""
    return _texts(zoo.bundled_set().with_name("open_english.lst"))


def _texts(listed: Path) -> list[str]:
    """Of a file in Seed-TTS form."""
    return [line.split("|")[3] for line in listed.read_text(encoding="utf-8").splitlines()]


def _random_words(words: list[str], chance: random.Random) -> str:
    """Three to nine words, the frequent ones more often: half of them among the first 500."""
    picked = []
    for _ in range(chance.randint(3, 9)):
        reach = 500 if chance.random() < 0.5 else len(words)
        picked.append(words[chance.randrange(reach)])
    if len(picked) > 5 and chance.random() < 0.5:
        picked[2] += ","
    text = " ".join(picked)
    return text[0].upper() + text[1:] + ("?" if chance.random() < 0.1 else ".")


def _common_words() -> list[str]:
    from wordfreq import top_n_list

    return [word for word in top_n_list("en", COMMON_WORDS) if word.isascii() and word.isalpha() and _can_be_read(word)]


def _can_be_read(word: str) -> bool:
    """Leave out abbreviations, which nobody says as they are written."""
    return len(word) > 2 or SHORT_WORDS.fullmatch(word) is not None
