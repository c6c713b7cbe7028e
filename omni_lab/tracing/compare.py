"""Whether the gaps of one trace are longer than those of another, or differ by chance only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

CONFIDENCE = 0.95
RESAMPLES = 1000
FEWEST = 20
"""Gaps on each side below which resampling tells nothing."""

SHORTER, LONGER, NONE = "shorter", "longer", "none"
"""What the gaps became: the whole interval lies below 1, above 1; or it does not, so no difference is shown."""

COMPARISON = ("worker", "other", "figure", "before_us", "after_us", "ratio", "low", "high", "verdict")


@dataclass(frozen=True, slots=True)
class Change:
    """A figure after, divided by the same figure before, and the interval of CONFIDENCE in which the truth may lie."""

    before: float
    after: float
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


def compare_gaps(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Median and mean gap of workers in two `gaps` frames, with columns COMPARISON.

    Workers are matched by name; where each side has only one, these two are.
    """
    names, others = (list(dict.fromkeys(one["worker"])) for one in (before, after))
    pairs = (
        [(names[0], others[0])] if len(names) == len(others) == 1 else [(one, one) for one in names if one in others]
    )
    rows = []
    for name, other in pairs:
        sides = [
            one.loc[one["worker"] == worker, "gap_us"].to_numpy() for one, worker in ((before, name), (after, other))
        ]
        for figure, function in (("median", np.median), ("mean", np.mean)):
            change = changed(*sides, function)
            rows.append((name, other, figure, *(getattr(change, column) for column in change.__slots__)))
    return pd.DataFrame(rows, columns=COMPARISON)


def changed(before: np.ndarray, after: np.ndarray, figure: np.ufunc, seed: int = 0) -> Change:
    """The ratio of a figure of two series of gaps, by a bootstrap of blocks.

    Gaps that follow each other are alike, so blocks of consecutive ones are drawn, circularly, each as long as the
    square root of their number (Politis and Romano, 1992). Both series are drawn independently, and the interval is
    that of the percentiles of the ratio. No ratio if a figure is 0; no interval with fewer than FEWEST gaps.
    """
    values = float(figure(before)), float(figure(after))
    if min(values) <= 0:
        return Change(*values, None, None, None, NONE)
    ratio = values[1] / values[0]
    if min(len(before), len(after)) < FEWEST:
        return Change(*values, ratio, None, None, NONE)
    random = np.random.default_rng(seed)
    drawn = [_resampled(series, figure, random) for series in (before, after)]
    usable = drawn[0] > 0
    margin = (1 - CONFIDENCE) / 2
    low, high = map(float, np.quantile(drawn[1][usable] / drawn[0][usable], [margin, 1 - margin]))
    return Change(*values, ratio, low, high, SHORTER if high < 1 else LONGER if low > 1 else NONE)


def _resampled(series: np.ndarray, figure: np.ufunc, random: np.random.Generator) -> np.ndarray:
    """The figure of RESAMPLES series that are drawn block by block."""
    length = round(len(series) ** 0.5)
    blocks = -(-len(series) // length)
    found = np.empty(RESAMPLES)
    for index in range(RESAMPLES):  # one at a time: long series by all resamples would not fit into memory
        begin = random.integers(0, len(series), blocks)
        rows = (begin[:, None] + np.arange(length)).ravel()[: len(series)] % len(series)
        found[index] = figure(series[rows])
    return found
