"""Clicks where two chunks meet: does the waveform bend there more sharply than at other places?

The second difference of the samples is small where a waveform is smooth and large where it jumps or kinks. Its mean
energy within 0.25 ms of a place, over that within 20 ms around, says how much the place stands out, whatever the level
of the speech. What is usual for the recording is told by all its other places. (On the embedded voice, windows of 0.5
and 1 ms find fewer of the jumps that are inserted, and none finds one that noise of its size covers.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR_S, AROUND_S = 0.00025, 0.020
"""Reach of a place, and of what it is compared with, to each side."""

STEP_S = 0.000125
"""Distance of two places elsewhere."""

ROUNDING = 6 * (2**-15) ** 2 / 12
"""Energy of the second difference (1, -2, 1) of what rounding to 16 bits adds: silence has nothing that stands out."""


@dataclass(frozen=True, slots=True)
class Clicks:
    """The edges of one recording beside its other places; NaN where there is no edge, or no other place."""

    edges: int
    worst_db: float
    """How much the worst edge stands out: energy at it over energy around it."""
    percentile: float
    """Percent of the other places that stand out less, mean over the edges. 50: an edge is a place like any other."""
    clicks: int
    """Edges that stand out more than every other place."""


def clicks(samples: np.ndarray, rate: int, edges: Sequence[int]) -> Clicks:
    """Looks at `edges`, each the position of the first sample of a chunk, in mono samples of full scale 1."""
    near, around = (round(reach * rate) for reach in (NEAR_S, AROUND_S))
    inside = np.array([edge for edge in edges if near < edge < len(samples) - near], int)
    places = np.arange(around, len(samples) - around, round(STEP_S * rate))
    for edge in inside:
        places = places[np.abs(places - edge) > around + near]
    if not len(inside) or not len(places):
        return Clicks(len(inside), math.nan, math.nan, 0)
    energy = np.concatenate([[0.0], np.cumsum(np.diff(samples.astype(np.float64), 2) ** 2)])
    at_edges, elsewhere = (_stands_out(energy, where, near, around) for where in (inside, places))
    below = np.searchsorted(np.sort(elsewhere), at_edges) / len(elsewhere)
    return Clicks(
        len(inside),
        10 * math.log10(at_edges.max()),
        100 * float(below.mean()),
        int((at_edges > elsewhere.max()).sum()),
    )


def _stands_out(energy: np.ndarray, places: np.ndarray, near: int, around: int) -> np.ndarray:
    """Mean energy near each place over that around it; `energy` is the running sum of the second difference squared.

    Second difference i is of samples i, i + 1, i + 2: one that crosses from sample p - 1 to p has its middle at p - 1.
    """

    def total(reach: int) -> tuple[np.ndarray, np.ndarray]:
        first = np.clip(places - 1 - reach, 0, len(energy) - 1)
        last = np.clip(places - 1 + reach, 0, len(energy) - 1)
        return energy[last] - energy[first], last - first

    (inner, few), (outer, many) = total(near), total(around)
    return (inner / few + ROUNDING) / ((outer - inner) / (many - few) + ROUNDING)
