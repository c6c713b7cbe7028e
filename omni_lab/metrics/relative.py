"""Ratios between configurations, compared repeat by repeat, with the interval in which the true ratio may lie.

Configurations run in turn, repeat by repeat, so what disturbs one repeat disturbs all its configurations. The ratio of
each repeat is taken by itself; ratios multiply, so their logarithms are averaged, and Student's t distribution says how
far the mean of so few may be off. With three repeats a bootstrap has no more than ten different samples; t does not
depend on resampling and is honest about how little three repeats tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from omni_lab.metrics.definitions import COMPARED, COMPARED_STAGES

CONFIDENCE = 0.95

HIGHER, LOWER, NOISE, FEW = "higher", "lower", "within noise", "too few repeats"
"""Verdicts: the whole interval lies above 1, below 1, around 1; or there is no interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure divided by the same figure of another configuration; `low` and `high` bound the interval, if any."""

    ratio: float
    low: float | None
    high: float | None
    verdict: str


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """The ratio of `values` to `base`, which were measured in the same repeats, in the same order.

    The geometric mean of the repeats' ratios, and its t interval of CONFIDENCE. None without a repeat, or where a
    figure is not above 0 and so has no ratio.
    """
    if not values or min(*values, *base) <= 0:
        return None
    logs = [math.log(value / other) for value, other in zip(values, base, strict=True)]
    center = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(center), None, None, FEW)
    return _judged(center, t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)))


def unpaired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """The ratio of `values` to `base`, which were measured apart, each over repeats of its own.

    The ratio of the geometric means, and the interval of CONFIDENCE of Welch's t test on the logarithms, its degrees of
    freedom (Welch and Satterthwaite) rounded down. None as in `paired_ratio`.
    """
    if not values or not base or min(*values, *base) <= 0:
        return None
    logs = [[math.log(value) for value in side] for side in (values, base)]
    center = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if min(map(len, logs)) < 2:
        return Ratio(math.exp(center), None, None, FEW)
    spreads = [(statistics.variance(side) / len(side), len(side) - 1) for side in logs]
    total = sum(spread for spread, _ in spreads)
    if not total:
        return _judged(center, 0.0)
    freedom = total**2 / sum(spread**2 / free for spread, free in spreads)
    return _judged(center, t_quantile(math.floor(freedom + 1e-9)) * math.sqrt(total))


def _judged(center: float, reach: float) -> Ratio:
    """The ratio whose logarithm is `center`, give or take `reach`."""
    low, high = math.exp(center - reach), math.exp(center + reach)
    verdict = HIGHER if low > 1 else LOWER if high < 1 else NOISE
    return Ratio(math.exp(center), low, high, verdict)


def compare(cells: Sequence[dict[str, Any]], base: str) -> None:
    """Writes `relative` into every cell: {figure: ratio to the configuration `base` at the same concurrency}.

    Only repeats that both cells have are compared. A figure without a ratio is None; so is `relative` itself in the
    cells of `base`, and where `base` has no cell to compare with.
    """
    bases = {cell["concurrency"]: cell for cell in cells if cell["configuration"] == base}
    for cell in cells:
        other = bases.get(cell["concurrency"])
        cell["relative"] = None if other is None or other is cell else dict(_ratios(cell, other))


def undisturbed(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The repeats that no capture disturbed; all of them if it was in each."""
    return [run for run in runs if "traces" not in run] or list(runs)


def _ratios(cell: dict[str, Any], base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    runs, others = ({run["repeat"]: run for run in undisturbed(one["runs"])} for one in (cell, base))
    pairs = [(runs[repeat], others[repeat]) for repeat in sorted(runs.keys() & others.keys())]
    for path in compared_figures(cell):
        found = [(figure_at(run, path), figure_at(other, path)) for run, other in pairs]
        measured = [pair for pair in found if None not in pair]
        ratio = paired_ratio(*map(list, zip(*measured, strict=True))) if measured else None
        yield ".".join(path), asdict(ratio) if ratio else None


def compared_figures(cell: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each figure which is compared, in a cell or in one repeat of it."""
    yield from ((name,) for name in COMPARED)
    for stage in cell.get("stages") or {}:
        yield from (("stages", stage, name) for name in COMPARED_STAGES)


def figure_at(run: dict[str, Any], path: Sequence[str]) -> float | None:
    """The figure behind these keys; None if it was not measured."""
    value: Any = run
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


@lru_cache
def t_quantile(freedom: int) -> float:
    """The t with P(|T| <= t) = CONFIDENCE for Student's T of `freedom` degrees."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < CONFIDENCE else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _inside(angle: float, freedom: int) -> float:
    """P(|T| <= tan(angle) * sqrt(freedom)): the finite series 26.7.3 and 26.7.4 of Abramowitz and Stegun (1964)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for step in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (step - 1) / step
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
