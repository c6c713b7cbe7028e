"""Timed text: the answer's tokens placed in the frames in which they are spoken.

The Talker reads one token a frame, and a word lasts about four frames but has two or three tokens. So that text and
sound stay together, the Thinker writes a hold after each word until it is time for the next one. Holds are special
tokens: a decoder of text leaves them out, and the text that is shown is exactly the text that was asked for.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Encoding

from omni_lab.zoo.training.network import HOLD_ID

AHEAD = 3
"""Frames by which the first token of a word comes before its sound."""


def timed(text: str, encoding: Encoding, words: np.ndarray) -> list[list[int]]:
    """For each word its token ids and the holds after it; `words` are the frames in which the words begin."""
    groups: list[list[int]] = [[]]
    written, spoken = 0, _word_of_character(text)
    for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
        word = spoken[end - 1]
        if word == len(groups):
            holds = max(0, int(words[word]) - AHEAD - written)
            groups[-1] += [HOLD_ID] * holds
            written += holds
            groups.append([])
        groups[-1].append(token)
        written += 1
    return groups


def _word_of_character(text: str) -> list[int]:
    """The number of the word to which each character belongs; a space belongs to the word after it."""
    numbers, word = [], -1
    for index, character in enumerate(text):
        if character == " " or index == 0:
            word += 1
        numbers.append(word)
    return numbers
