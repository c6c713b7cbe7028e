"""At which pace the teacher reads a bundled sentence: one at which it is understood as Code2Wav says it.

A sentence that is misheard at the usual pace is often understood a little slower or faster: other sounds meet in a
frame. Thinker and Talker then learn that reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from omni_lab.quality.ear import Ear
from omni_lab.quality.words import SPELLED, count
from omni_lab.zoo.training import codec
from omni_lab.zoo.training.codes import Codebooks
from omni_lab.zoo.training.pitch import RATE
from omni_lab.zoo.training.teacher import PACE, Teacher

OTHERS = (0.9, 0.8, 1.0, 0.75)
"""What is tried where PACE is not understood."""


def choose(
    texts: list[str], teacher: Teacher, codebooks: Codebooks, decoder: nn.Module, say: Callable[[str], None]
) -> dict[str, float]:
    """The pace of each text that is understood better at another one than PACE, the nearest first."""
    ear, chosen = Ear(), {}
    for text in texts:
        best, pace = min(_errors(text, teacher, codebooks, decoder, ear), key=lambda found: found[0])
        if pace != PACE:
            chosen[text] = pace
            say(f"paces: {text!r} is read at {pace}: {best} words are misheard")
    return chosen


def _errors(
    text: str, teacher: Teacher, codebooks: Codebooks, decoder: nn.Module, ear: Ear
) -> Iterator[tuple[int, float]]:
    """(words misheard, pace), until there is no error."""
    for pace in (PACE, *OTHERS):
        reading = teacher.read(text, pace)
        codes = torch.from_numpy(codebooks.encode(reading.features, reading.pitch).astype(np.int64))
        with torch.no_grad():
            wave = codec.forward(decoder, codes[None])[0][0].clamp(-1, 1).numpy()
        errors = count(SPELLED, text, ear.hear(wave, RATE)).errors
        yield errors, pace
        if not errors:
            return
