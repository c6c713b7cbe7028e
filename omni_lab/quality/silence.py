"""Silence: before the first sound, after the last one, and the longest pause between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 10 ** (-50 / 20)
"""A window whose root mean square is below -50 dB of full scale is silent."""

WINDOWS_A_SECOND = 100


@dataclass(frozen=True, slots=True)
class Silence:
    """In seconds, to 10 ms. Where all is silent, all of it is `leading`."""

    leading: float
    trailing: float
    longest: float
    """Of the pauses between two sounds; 0 without one."""


def silence(samples: np.ndarray, rate: int) -> Silence:
    """Finds the silence in mono samples of full scale 1."""
    if not len(samples):
        return Silence(0.0, 0.0, 0.0)
    starts = np.arange(0, len(samples), rate // WINDOWS_A_SECOND)
    ends = np.append(starts[1:], len(samples))
    power = np.add.reduceat(samples.astype(np.float64) ** 2, starts) / (ends - starts)
    (loud,) = np.nonzero(power >= LEVEL**2)
    if not len(loud):
        return Silence(len(samples) / rate, 0.0, 0.0)
    pauses = starts[loud[1:]] - ends[loud[:-1]]
    longest = int(pauses.max(initial=0))
    return Silence(int(starts[loud[0]]) / rate, (len(samples) - int(ends[loud[-1]])) / rate, longest / rate)
