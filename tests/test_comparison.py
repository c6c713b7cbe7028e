"""Comparisons of runs: paired and unpaired ratios, what was the same work, and their figure and table."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from pathlib import Path

import pandas as pd
import pytest

import omni_lab
from omni_lab.comparison import DIFFERENT, NO_RATIO, PAIRED, UNPAIRED, more_is_better
from omni_lab.experiment import load_configurations
from omni_lab.frames import Run
from omni_lab.metrics.definitions import COMPARED
from omni_lab.metrics.relative import FEW, HIGHER, LOWER, NOISE, t_quantile, unpaired_ratio
from omni_lab.views import comparison as views
from omni_lab.views import theme
from omni_lab.workbench.runs import RunJob

REFERENCE = Path(__file__).parent.parent / "results" / "reference"

EXPERIMENT = """
name: {name}
model: {{checkpoint: nano}}
executor: inline
connector: in_process
optimizations: {{graphs: {{thinker: false, talker: false, code2wav: false}}}}
stages: {{talker: {{sampling: {{temperature: 0.0, repetition_penalty: 1.0}}}}}}
workload:
  {{num_prompts: 2, concurrency: [1, 2], warmup: 1, repeats: 2, output: {{text_tokens: 4, codec_frames: {frames}}}}}
results: {{save_audio: 0}}
sweep: {{rungs: {rungs}}}
"""
WHOLE = "{name: whole, optimizations: {async_chunk: false}}"


def run_of(folder: Path, name: str, rungs: str, frames: int = 8) -> Run:
    file = folder / f"{name}.yaml"
    file.write_text(EXPERIMENT.format(name=name, rungs=rungs, frames=frames))
    return RunJob(*load_configurations(file), folder / "results" / name).result()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of two configurations, one of the second alone, and one of it with longer answers."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "both": run_of(folder, "both", f"[{{name: chunked}}, {WHOLE}]"),
        "again": run_of(folder, "again", f"[{WHOLE}]"),
        "longer": run_of(folder, "longer", f"[{WHOLE}]", frames=9),
    }


@pytest.mark.parametrize("name", ["ladder", "peers"])
def test_one_run_is_compared_as_its_record_says(name: str) -> None:
    run = omni_lab.load(REFERENCE / name)
    ours = omni_lab.compare(run).dropna(subset=["ratio"])
    assert set(ours["compared"]) == {PAIRED} and set(ours["differs"]) == {""}
    key = ["configuration", "concurrency", "stage", "figure"]
    columns = [*key, "ratio", "low", "high", "verdict"]
    left, right = (
        table[columns].astype({"configuration": str, "concurrency": int, "stage": str}).sort_values(key)
        for table in (ours, run.ratios)
    )
    pd.testing.assert_frame_equal(
        left.reset_index(drop=True), right.reset_index(drop=True), check_dtype=False, check_index_type=False
    )


def test_two_runs_are_compared_unpaired_and_each_says_so(runs: dict[str, Run]) -> None:
    table = omni_lab.compare([runs["both"], runs["again"]])
    own, other = table[table["run"] == "both"], table[table["run"] == "again"]
    assert set(own["compared"]) == {PAIRED} and set(other["compared"]) == {UNPAIRED}
    assert set(own["against"]) == {"chunked"} and set(other["against"]) == {"chunked of both"}
    assert set(other["configuration"]) == {"whole"} and set(other["differs"]) == {""}
    row = other[(other["figure"] == "mean_audio_ttfp_ms") & (other["concurrency"] == 2)].iloc[0]
    sides = [
        [one["mean_audio_ttfp_ms"] for one in cell["runs"]]
        for cell in (runs["again"].record["cells"][1], runs["both"].record["cells"][1])
    ]
    expected = unpaired_ratio(*sides)
    assert expected and row["ratio"] == expected.ratio and (row["low"], row["high"]) == (expected.low, expected.high)
    assert row["value"] == pytest.approx(statistics.fmean(sides[0]))
    assert row["base"] == pytest.approx(statistics.fmean(sides[1])) and row["repeats"] == 2


def test_a_run_with_a_base_of_its_own_is_compared_with_that(runs: dict[str, Run]) -> None:
    table = omni_lab.compare({"first": runs["both"], "second": runs["both"]})
    assert list(dict.fromkeys(table["run"])) == ["first", "second"] and set(table["compared"]) == {PAIRED}


def test_other_work_gets_no_verdict_but_says_what_differs(runs: dict[str, Run]) -> None:
    table = omni_lab.compare([runs["both"], runs["longer"]])
    other = table[table["run"] == "longer"].dropna(subset=["ratio"])
    assert set(other["verdict"]) == {DIFFERENT} and other["better"].isna().all()
    assert other["differs"].str.contains("workload.output").all()
    assert other["differs"].str.contains(r"codec frames an answer \(9 against 8\)").all()
    kept = table[table["run"] == "both"].dropna(subset=["ratio"])
    assert DIFFERENT not in set(kept["verdict"])


def test_base_and_concurrency_are_chosen_by_name(runs: dict[str, Run]) -> None:
    table = omni_lab.compare(runs["both"].path, base="whole", concurrency=2)
    assert set(table["configuration"]) == {"chunked"} and set(table["concurrency"]) == {2}
    plain = omni_lab.compare(runs["both"], concurrency=[2])
    one, other = (frame[frame["figure"] == "request_throughput_per_s"]["ratio"].item() for frame in (table, plain))
    assert one == pytest.approx(1 / other)
    with pytest.raises(ValueError, match="base: expected one of chunked, whole, got 'hole'; did you mean 'whole'"):
        omni_lab.compare(runs["both"], base="hole")
    with pytest.raises(ValueError, match=r"concurrency: expected some of \[1, 2\], got \[8\]"):
        omni_lab.compare(runs["both"], concurrency=8)


def test_loads_may_come_from_a_table(runs: dict[str, Run]) -> None:
    loads = runs["both"].cells["concurrency"]
    whole = omni_lab.compare(runs["both"])
    pd.testing.assert_frame_equal(omni_lab.compare(runs["both"], concurrency=loads.unique()), whole)
    for load in (loads.iloc[0], float(loads.iloc[0])):
        assert set(omni_lab.compare(runs["both"], concurrency=load)["concurrency"]) == {1}
    with pytest.raises(ValueError, match=r"concurrency: expected some of \[1, 2\], got \[None\]"):
        omni_lab.compare(runs["both"], concurrency=[math.nan])


def test_a_run_of_an_older_version_is_compared_as_far_as_it_goes(runs: dict[str, Run]) -> None:
    cells = [
        {name: value for name, value in cell.items() if name not in ("runs", "failed")}
        for cell in runs["both"].record["cells"]
    ]
    requests = runs["both"].requests.assign(prompt=None)
    older = dataclasses.replace(runs["both"], record={"cells": cells}, requests=requests)
    table = omni_lab.compare(older)
    assert set(table["verdict"]) == {NO_RATIO} and table["value"].notna().all() and set(table["differs"]) == {""}
    both = omni_lab.compare({"new": runs["both"], "old": older}, base="chunked")
    assert set(both[both["run"] == "old"]["verdict"]) == {NO_RATIO}
    chunked = [cell for cell in cells if cell["configuration"] == "chunked"]
    apart = omni_lab.compare([runs["again"], dataclasses.replace(older, record={"cells": chunked})])
    assert set(apart["compared"]) == {UNPAIRED} and apart["differs"].str.contains("model.checkpoint").all()


def test_better_follows_the_direction_of_the_figure() -> None:
    lower = {"mean_audio_ttfp_ms", "p99_audio_ttfp_ms", "mean_audio_rtf", "mean_audio_underrun_s", "gap_us_median"}
    assert not any(map(more_is_better, lower))
    assert all(more_is_better(f"{name}_per_s") for name in COMPARED if "throughput" in name)
    assert more_is_better("tokens_per_s") and more_is_better("step_ms") is None
    table = omni_lab.compare(REFERENCE / "peers")
    clear = table[table["verdict"].isin([HIGHER, LOWER]) & (table["figure"] != "step_ms")]
    faster = clear["figure"].map(more_is_better) == (clear["ratio"] > 1)
    assert len(clear) and (clear["better"] == faster).all()
    assert table[~table["verdict"].isin([HIGHER, LOWER])]["better"].isna().all()


def test_unpaired_ratio_is_welch_on_logarithms() -> None:
    values, base = [10.0, 11.0, 12.5], [5.0, 5.5, 6.25]
    found = unpaired_ratio(values, base)
    spread = statistics.stdev(map(math.log, values))
    reach = t_quantile(4) * spread * math.sqrt(2 / 3)  # equal spreads: 2 x (3 - 1) degrees of freedom
    assert found and found.ratio == pytest.approx(2) and found.high == pytest.approx(2 * math.exp(reach))
    assert found.low == pytest.approx(2 * math.exp(-reach)) and found.verdict == HIGHER
    assert unpaired_ratio([1.0], [2.0, 2.1]).verdict == FEW
    assert unpaired_ratio([1.0, 1.0], [2.0, 2.0]).verdict == LOWER
    assert unpaired_ratio([0.0, 1.0], [1.0, 1.0]) is None and unpaired_ratio([], [1.0]) is None


def test_unpaired_intervals_hold_the_true_ratio() -> None:
    """Of unequal numbers of repeats and unequal noise, about one interval in twenty may miss."""
    draw = random.Random(7)
    inside = 0
    for _ in range(2000):
        values = [1.5 * math.exp(draw.gauss(0, 0.10)) for _ in range(3)]
        base = [math.exp(draw.gauss(0, 0.03)) for _ in range(4)]
        found = unpaired_ratio(values, base)
        inside += found.low <= 1.5 <= found.high
    assert 0.93 < inside / 2000 < 0.99


def test_figure_shows_ratios_with_intervals_and_noise_grey() -> None:
    table = omni_lab.compare(REFERENCE / "ladder", concurrency=[1, 16])
    figure = views.figure(table)
    drawn = sum(len(trace.x) for trace in figure.data if not trace.showlegend)
    shown = table[table["figure"].isin([name.rpartition(".")[2] for name in views.FIGURES])]
    shown = shown[shown["stage"].isna() | (shown["stage"] == "talker")].dropna(subset=["ratio"])
    assert drawn >= len(shown)
    points = [trace for trace in figure.data if trace.x[0] is not None]
    assert sorted(x for trace in points for x in trace.x) == sorted(shown["ratio"])
    for trace in points:
        assert (trace.marker.color == theme.GREY) == (trace.name in (NOISE, FEW, DIFFERENT))
    assert {axis.type for axis in figure.select_xaxes()} == {"log"}
    better = next(trace for trace in points if trace.name == "better")
    row = shown[shown["ratio"] == better.x[0]].iloc[0]
    assert better.x[0] + better.error_x.array[0] == pytest.approx(row["high"])
    assert f"x{row['ratio']:.3g}" in better.customdata[0] and row["verdict"] in better.customdata[0]


def test_runs_of_one_configuration_alone_are_before_and_after(runs: dict[str, Run]) -> None:
    table = omni_lab.compare({"before": runs["again"], "after": runs["longer"]})
    assert set(table["run"]) == {"after"} and set(table["configuration"]) == {"whole"}
    assert set(table["compared"]) == {UNPAIRED} and set(table["concurrency"]) == {1, 2}
    assert set(table.dropna(subset=["ratio"])["verdict"]) == {DIFFERENT}
    assert omni_lab.compare(runs["again"]).empty


def test_summary_names_each_verdict(runs: dict[str, Run]) -> None:
    table = omni_lab.compare([runs["both"], runs["again"]])
    content = views.summary(table)
    assert {row[0] for row in content["rows"]} == {"whole of both", "whole of again, unpaired"}
    assert len(content["rows"]) == 2 * 2 * len(views.FIGURES)
    assert all(len(row) == len(content["head"]) for row in content["rows"])
    empty = views.figure(table.iloc[:0])
    assert empty.layout.annotations[0].text == "not measured"


def test_one_repeat_has_a_ratio_without_interval_drawn_hollow(runs: dict[str, Run]) -> None:
    record = runs["both"].record
    cells = [{**cell, "runs": cell["runs"][:1]} for cell in record["cells"]]
    table = omni_lab.compare(dataclasses.replace(runs["both"], record={**record, "cells": cells}))
    found = table.dropna(subset=["ratio"])
    assert len(found) and set(found["verdict"]) == {FEW} and found["low"].isna().all() and set(found["repeats"]) == {1}
    figure = views.figure(table)
    points = [trace for trace in figure.data if trace.x[0] is not None]
    assert points and all(trace.marker.symbol.endswith("-open") for trace in points)
    assert "one repeat, so no interval" in points[0].customdata[0]
