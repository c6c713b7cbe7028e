"""Ratios between configurations: known answers, coverage of the interval, and pairing by repeat."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from omni_lab.metrics.definitions import COMPARED, DEFINITIONS
from omni_lab.metrics.relative import FEW, HIGHER, LOWER, NOISE, Ratio, compare, paired_ratio, t_quantile
from omni_lab.metrics.table import ratio_table


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (1000, 1.9623)],
)
def test_quantiles_are_those_of_printed_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_interval_worked_out_by_hand() -> None:
    """Ratios 2 and 8: mean of logarithms ln 4, their standard error ln 4 / 2, one degree of freedom."""
    found = paired_ratio([2.0, 8.0], [1.0, 1.0])
    reach = 12.7062 * math.log(4) / 2
    assert found.ratio == pytest.approx(4)
    assert found.low == pytest.approx(4 * math.exp(-reach), rel=1e-3)
    assert found.high == pytest.approx(4 * math.exp(reach), rel=1e-3)
    assert found.verdict == NOISE


def test_what_disturbs_a_whole_repeat_cancels() -> None:
    machine = [1.0, 3.7, 0.4, 2.2]
    found = paired_ratio([2 * speed for speed in machine], machine)
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))
    assert found.verdict == HIGHER
    assert paired_ratio(machine, [2 * speed for speed in machine]).verdict == LOWER


def test_equal_figures_are_within_noise() -> None:
    assert paired_ratio([5.0, 6.0, 7.0], [5.0, 6.0, 7.0]) == Ratio(1.0, 1.0, 1.0, NOISE)


def test_one_repeat_has_a_ratio_and_no_interval() -> None:
    assert paired_ratio([3.0], [2.0]) == Ratio(pytest.approx(1.5), None, None, FEW)


@pytest.mark.parametrize(("values", "base"), [([], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_no_ratio_without_positive_figures(values: list[float], base: list[float]) -> None:
    assert paired_ratio(values, base) is None


@pytest.mark.parametrize("repeats", [3, 5])
@pytest.mark.parametrize("true", [1.0, 2.0])
def test_the_interval_holds_the_true_ratio_in_95_of_100_runs(true: float, repeats: int) -> None:
    """Figures with 5 % of noise of their own on a machine that drifts: 2000 runs of a few repeats."""
    draw = random.Random(repeats)
    inside, verdicts = 0, Counter()
    for _ in range(2000):
        machine = [math.exp(draw.gauss(0, 0.5)) for _ in range(repeats)]
        base = [speed * math.exp(draw.gauss(0, 0.05)) for speed in machine]
        values = [true * speed * math.exp(draw.gauss(0, 0.05)) for speed in machine]
        found = paired_ratio(values, base)
        inside += found.low <= true <= found.high
        verdicts[found.verdict] += 1
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)
    assert verdicts[NOISE if true == 1 else HIGHER] / 2000 > 0.9


def cell(configuration: str, concurrency: int | None, **figures: list[float | None]) -> dict:
    """A cell whose figures have one value for each repeat; the repeats stand in another order."""
    count = max(map(len, figures.values()))
    runs = [{"repeat": r} | {name: values[r] for name, values in figures.items()} for r in range(count)]
    stages = {"talker": {"step_ms": 1.0}}
    for run in runs:
        run["stages"] = {"talker": {"step_ms": 2.0 * run["request_throughput"]}}
    return {"configuration": configuration, "concurrency": concurrency, "runs": runs[::-1], "stages": stages}


def test_cells_are_compared_with_the_base_at_their_concurrency_repeat_by_repeat() -> None:
    cells = [
        cell("a", 1, request_throughput=[1.0, 10.0, 100.0], mean_ttft_ms=[4.0, 4.0, None]),
        cell("a", 2, request_throughput=[7.0]),
        cell("b", 1, request_throughput=[2.0, 20.0], mean_ttft_ms=[2.0, 2.0]),
        cell("b", 4, request_throughput=[2.0]),
    ]
    compare(cells, "a")
    assert cells[0]["relative"] is cells[1]["relative"] is None
    assert cells[3]["relative"] is None  # nothing at 4 to compare with
    found = cells[2]["relative"]
    assert set(found) == {
        *COMPARED,
        "stages.talker.step_ms",
        "stages.talker.gap_us_median",
        "stages.talker.tokens_per_s",
    }
    assert (found["request_throughput"]["ratio"], found["request_throughput"]["verdict"]) == (pytest.approx(2), HIGHER)
    assert (found["mean_ttft_ms"]["ratio"], found["mean_ttft_ms"]["verdict"]) == (pytest.approx(0.5), LOWER)
    assert found["stages.talker.step_ms"]["ratio"] == pytest.approx(2)
    assert found["mean_audio_rtf"] is found["stages.talker.gap_us_median"] is None


def test_the_console_says_none_where_the_interval_holds_one() -> None:
    cells = [
        cell("a", 1, request_throughput=[1.0, 10.0, 100.0], mean_ttft_ms=[4.0, 4.1, 3.9]),
        cell("faster", 1, request_throughput=[2.0, 20.0, 200.0], mean_ttft_ms=[4.1, 4.0, 4.0]),
    ]
    compare(cells, "a")
    head, _, row, legend = ratio_table(cells).splitlines()
    assert "TTFT ms" in head and "none" in legend
    assert "x2 (2-2)" in row
    found = cells[1]["relative"]["mean_ttft_ms"]
    assert f"none ({found['low']:.3g}-{found['high']:.3g})" in row
    assert "relative" in DEFINITIONS
