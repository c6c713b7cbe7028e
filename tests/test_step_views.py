"""Pictures and tables of steps and gaps, and the checks of a run, from rows whose answers can be worked out by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from omni_lab.experiment import load_experiment
from omni_lab.frames import load
from omni_lab.metrics.aggregate import repeat_figures, stage_figures
from omni_lab.metrics.phases import CAUSES, HOST, PHASES
from omni_lab.metrics.records import RequestRow, StepRow
from omni_lab.results import RunDirectory, request_line
from omni_lab.views import checks, figures, gantt, report, steps, tables, theme, timeline
from omni_lab.views.report import write_report
from omni_lab.views.trust import findings, warnings
from tests.pipelines import BASE

RATE = 24_000
PARTS = {"prepare": 100, "forward": 700, "sample": 200}
"""Of every step here, in µs: it lasts 1 ms."""


def loop(
    gaps: list[dict[str, float]], stage: str = "talker", kind: str = "decode", batch: int = 1, tokens: int = 1
) -> list[StepRow]:
    """Steps of 1 ms of one worker, each after a gap with these phases in µs."""
    rows, now = [], 0
    for number, phases in enumerate(gaps):
        start = now + round(1000 * sum(phases.values()))
        now = start + 1_000_000
        spent = {f"{phase}_ns": round(1000 * us) for phase, us in (phases | PARTS).items()}
        rows.append(StepRow(stage, 0, number, start, now, batch, tokens, kind, **spent))
    return rows


def gap(us: float, **phases: float) -> dict[str, float]:
    """A gap of the loop of `us`: half building payloads, a quarter sending, an eighth scheduling, an eighth other."""
    return {"payload": us / 2, "send": us / 4, "schedule": us / 8, "other": us / 8} | phases


def frame(rows: list[StepRow], configuration: str = "before", concurrency: float | None = 16) -> pd.DataFrame:
    table = pd.DataFrame([{name: getattr(row, name) for name in StepRow.__slots__} for row in rows])
    table.insert(0, "repeat", 0)
    table.insert(0, "concurrency", math.nan if concurrency is None else concurrency)
    return table.assign(configuration=configuration)


def two(before_us: list[float], after_us: list[float]) -> pd.DataFrame:
    """A stage in two configurations, the later one first in the alphabet."""
    before, after = ([gap(us) for us in values] for values in (before_us, after_us))
    return pd.concat([frame(loop(before), "before"), frame(loop(after), "after")], ignore_index=True)


# Gaps


@pytest.mark.parametrize("concurrency", [16, None])
def test_a_gap_is_what_the_loop_did_between_two_steps(concurrency: float | None) -> None:
    rows = frame(loop([gap(9), gap(40), gap(80, idle=500, input=70, slot=30)]), concurrency=concurrency)
    found = steps.gaps(rows)
    assert found["step"].tolist() == [1, 2]
    assert found["gap_us"].tolist() == pytest.approx([40, 80])
    assert found["payload_us"].tolist() == pytest.approx([20, 40])
    assert found["between_us"].tolist() == pytest.approx([40, 180])
    assert found[[f"{cause}_us" for cause in CAUSES]].sum(axis=1).tolist() == pytest.approx([40, 180])


def test_what_is_no_gap_has_no_row() -> None:
    rows = frame(loop([gap(9), gap(40), gap(80), gap(60)]))
    other = rows.assign(replica=1)
    inside = rows.assign(replica=2, schedule_ns=0)
    unclocked = rows.assign(replica=3, schedule_ns=math.nan)
    found = steps.gaps(pd.concat([rows.drop(index=1), other, inside, unclocked]))
    assert found["replica"].value_counts().to_dict() == {0: 2, 1: 3}
    lost = found[found["replica"] == 0]
    assert lost["gap_us"].tolist() == pytest.approx([80, 60])
    assert math.isnan(lost["between_us"].iloc[0]) and lost["between_us"].iloc[1] == pytest.approx(60)


# Timeline


def bars(figure: Any, name: str, axis: str = "x") -> pd.DataFrame:
    (trace,) = [one for one in figure.data if one.type == "bar" and one.name == name and one.xaxis == axis]
    return pd.DataFrame({"lane": trace.y, "base": trace.base, "width": trace.x, "step": trace.customdata[:, 0]})


def labels(figure: Any, axis: str = "x") -> pd.DataFrame:
    (trace,) = [one for one in figure.data if one.type == "scatter" and one.xaxis == axis]
    return pd.DataFrame({"lane": trace.y, "x": trace.x, "text": trace.text})


def test_timeline_shows_the_same_number_of_steps_of_each_configuration_from_zero() -> None:
    figure = timeline.timeline(two([2800] * 30, [41] * 30), count=6)
    forward = bars(figure, "forward")
    assert forward.groupby("lane").size().tolist() == [6, 6]
    assert forward["width"].tolist() == pytest.approx([0.7] * 12)
    assert forward[forward["lane"] == 0]["base"].tolist() == pytest.approx([0.1 + 3.8 * step for step in range(6)])
    assert forward[forward["lane"] == 1]["base"].tolist() == pytest.approx([0.1 + 1.041 * step for step in range(6)])
    assert bars(figure, "prepare")["base"].iloc[0] == 0
    ticks = figure.layout.yaxis.ticktext
    assert [words.partition("<br>")[0] for words in ticks] == ["before", "after"]


def test_timeline_fills_each_gap_with_its_causes_and_labels_it() -> None:
    figure = timeline.timeline(two([2800] * 30, [41] * 30), count=4)
    ends = bars(figure, "sample").query("lane == 0")
    payload = bars(figure, "build payloads").query("lane == 0")
    assert payload["base"].tolist() == pytest.approx((ends["base"] + ends["width"]).tolist()[:-1])
    assert payload["width"].tolist() == pytest.approx([1.4] * 3)
    filled = sum(bars(figure, steps.CAUSE_NAMES[cause])["width"] for cause in HOST)
    assert filled.tolist() == pytest.approx([2.8] * 3 + [0.041] * 3)
    shown = labels(figure)
    assert {"2,800 µs", "<b>2,800 µs</b>"} == set(shown[shown["lane"] < 0.5]["text"])
    assert "<b>41.0 µs</b>" in set(shown[shown["lane"] > 0.5]["text"])


def test_timeline_enlarges_the_median_gap() -> None:
    figure = timeline.timeline(two([2800] * 30, [41] * 30))
    assert [one.strip() for one in labels(figure, "x2")["text"]] == ["<b>2,800 µs</b>", "<b>41.0 µs</b>"]
    assert labels(figure, "x2")["x"].tolist() == pytest.approx([2800, 41])
    assert bars(figure, "send", "x2")["width"].tolist() == pytest.approx([700, 41 / 4])
    assert bars(figure, "send", "x2")["base"].tolist() == pytest.approx([1400, 41 / 2])


def test_timeline_is_about_the_median_gap_of_uninterrupted_decode_steps() -> None:
    values = [10.0, 90.0] * 10 + [50.0] + [10.0, 90.0] * 10
    rows = frame(loop([gap(us) for us in [10.0, *values]]))
    figure = timeline.timeline(rows, count=4)
    assert bars(figure, "forward")["step"].tolist() == [19, 20, 21, 22]
    assert labels(figure)["text"].tolist()[0] == "<b>50.0 µs</b>"
    rows.loc[[22, 23], "kind"] = "prefill"
    assert bars(timeline.timeline(rows, count=4), "forward")["step"].tolist() == [18, 19, 20, 21]
    rows.loc[20:, "step"] += 5  # some were lost before, so no four that follow on one another have this gap among them
    steps_shown = bars(timeline.timeline(rows, count=4), "forward")["step"]
    assert len(steps_shown) == 4 and np.diff(steps_shown).tolist() == [1, 1, 1] and 26 not in set(steps_shown)


def test_timeline_compares_steps_of_one_batch() -> None:
    batches = [4] * 15 + [8] * 15
    before, after = two([2800] * 15 + [5000] * 15, [41] * 30), [8] * 30
    before["batch"] = [*batches, *after]
    figure = timeline.timeline(before, count=6)
    assert figure.layout.title.text.endswith("consecutive decode steps around their median gap at batch 8")
    assert bars(figure, "forward").query("lane == 0")["step"].between(15, 29).all()
    assert labels(figure, "x2")["x"].tolist() == pytest.approx([5000, 41])
    assert all(words.endswith("<br>8 in a step") for words in figure.layout.yaxis.ticktext)
    before["batch"] = [*batches, *[7] * 30]  # no batch in common: the nearest to the median, 7
    figure = timeline.timeline(before, count=6)
    assert figure.layout.title.text.endswith("at batch 7 to 8") and labels(figure, "x2")["x"].iloc[0] == 5000


def test_labels_of_a_timeline_keep_their_distance() -> None:
    figure = timeline.timeline(two([90_000] * 30, [41] * 30), count=20)
    room = timeline.LABEL_WIDTH * (20 * 1.0 + 19 * 90)
    for _, lane in labels(figure).groupby("lane"):
        assert all(late - early >= room for early, late in pairwise(sorted(lane["x"])))
        assert sum("<b>" in words for words in lane["text"]) == 1
    assert len(labels(figure).query("lane > 0.5")) == 1  # all of that lane lies within one label's width


def test_waiting_is_drawn_and_is_no_part_of_the_label() -> None:
    figure = timeline.timeline(frame(loop([gap(40, input=900)] * 10)), count=3)
    assert bars(figure, "wait for input")["width"].tolist() == pytest.approx([0.9, 0.9])
    assert set(labels(figure)["text"]) == {"40.0 µs + wait", "<b>40.0 µs + wait</b>"}
    assert labels(figure, "x2")["x"].tolist() == pytest.approx([40])


def test_a_stage_without_decode_steps_shows_what_it_does() -> None:
    rows = frame(loop([gap(50)] * 5, "code2wav", "vocode", tokens=25))
    assert len(bars(timeline.timeline(rows, count=8), "forward")) == 4  # all that there are after a gap
    alone = timeline.timeline(rows[:1])
    assert not alone.data and alone.layout.annotations[0].text == "not measured"


# Histogram and causes


def test_histogram_has_the_share_of_gaps_in_each_bin() -> None:
    values = [10.0] * 3 + [1000.0] * 1
    figure = steps.histogram(two([1.0, *values], [1.0, 10.0, 10.0]))
    names = [trace.name for trace in figure.data]
    assert names == ["before: median 10.0 µs of 4 gaps", "after: median 10.0 µs of 2 gaps"]
    before, after = figure.data
    assert sum(before.y) == pytest.approx(1) and sum(after.y) == pytest.approx(1)
    peaks = {edges: share for edges, share in zip(map(tuple, before.customdata), before.y, strict=True) if share}
    assert sorted(peaks.values()) == pytest.approx([0.25, 0.75])
    (low, high), _ = sorted(peaks.items(), key=lambda item: -item[1])[0]
    assert low <= 10 < high and figure.layout.xaxis.type == "log"
    assert [shape.x0 for shape in figure.layout.shapes] == [10, 10]


def stage_table(**cells: dict[str, float | None]) -> pd.DataFrame:
    rows = []
    for key, causes in cells.items():
        configuration, _, concurrency = key.partition("_")
        figures = {f"gap_{cause}_us": causes.get(cause, 0.0 if causes else None) for cause in CAUSES}
        rows.append({"configuration": configuration, "concurrency": int(concurrency), "stage": "talker", **figures})
    return pd.DataFrame(rows)


def test_causes_are_stacked_to_the_gap_and_cells_without_one_have_no_bar() -> None:
    table = stage_table(
        before_1={"payload": 2000.0, "send": 500.0, "schedule": 200.0, "other": 100.0, "input": 30_000.0},
        before_16={},
        after_1={"payload": 20.0, "schedule": 20.0, "other": 1.0},
    )
    figure = steps.causes(table)
    stacks = [[trace for trace in figure.data if trace.type == "bar" and trace.xaxis == axis] for axis in ("x", "x2")]
    names = [[steps.CAUSE_NAMES[cause] for cause in parts] for parts in (HOST, (*HOST, "input", "slot"))]
    assert [[trace.name for trace in stack] for stack in stacks] == names
    assert all(list(map(list, trace.y)) == [["before", "after"], ["1", "1"]] for stack in stacks for trace in stack)
    assert np.sum([trace.x for trace in stacks[0]], axis=0) == pytest.approx([2800, 41])
    assert np.sum([trace.x for trace in stacks[1]], axis=0) == pytest.approx([32.8, 0.041])  # ms: it is long
    payload = next(trace for trace in stacks[0] if trace.name == "build payloads")
    assert payload.customdata[0].tolist() == pytest.approx([2000, 2000 / 2800])
    ends = [trace for trace in figure.data if trace.type == "scatter"]
    assert [[one.strip() for one in trace.text] for trace in ends] == [["2,800 µs", "41.0 µs"], ["32.8 ms", "0.04 ms"]]
    assert (figure.layout.xaxis.title.text, figure.layout.xaxis2.title.text) == ("µs", "ms")


@pytest.mark.parametrize("draw", [timeline.timeline, steps.histogram, gantt.window])
def test_a_figure_without_steps_says_so(draw: Any) -> None:
    figure = draw(frame(loop([gap(1)])).iloc[:0])
    assert not figure.data and figure.layout.annotations[0].text == "not measured"
    assert steps.causes(stage_table(before_1={})).layout.annotations[0].text == "not measured"


# All stages in a window


def test_window_has_a_row_for_each_worker_and_a_bar_for_each_step() -> None:
    talker, vocoder = loop([gap(1000)] * 10), loop([gap(4000)] * 4, "code2wav", "vocode", batch=4)
    rows = frame([*talker, *vocoder])
    rows = pd.concat([rows, rows[rows["stage"] == "talker"].assign(replica=1, batch=2)])
    figure = gantt.window(rows, start_ns=1_500_000, end_ns=6_000_000)
    decode = next(trace for trace in figure.data if trace.name == "decode")
    assert list(decode.y) == ["talker 0"] * 3 + ["talker 1"] * 3
    assert list(decode.base)[:3] == pytest.approx([0, 1.5, 3.5])  # the first one had begun before
    assert list(decode.x)[:3] == pytest.approx([0.5, 1, 1])
    vocode = next(trace for trace in figure.data if trace.name == "vocode")
    assert list(vocode.y) == ["code2wav 0"] and list(vocode.marker.opacity) == [1.0]
    assert list(decode.marker.opacity) == pytest.approx([0.3 + 0.7 / 4] * 3 + [0.3 + 0.7 / 2] * 3)
    assert list(figure.layout.xaxis.range) == [0, 4.5]


def test_window_is_chosen_in_the_middle() -> None:
    rows = frame(loop([gap(1000)] * 10 * gantt.SHOWN))
    (decode,) = gantt.window(rows).data
    assert gantt.SHOWN <= len(decode.x) <= gantt.SHOWN + 2
    assert f"from {20e-3 * gantt.SHOWN / 2 * 0.9:.2f} s" in gantt.window(rows).layout.xaxis.title.text


def test_a_hundred_thousand_steps_are_thinned_and_say_so() -> None:
    rows = frame(loop([gap(1000.0 + index % 7) for index in range(100_000)]))
    whole = gantt.window(rows, 0, rows["end_ns"].max())
    (decode,) = whole.data
    assert len(decode.x) <= gantt.BARS and f"100,000 steps as {len(decode.x)} bars" in whole.layout.title.text
    assert decode.customdata[:, 1].sum() == pytest.approx(100_000.0, rel=1e-3)  # 1 ms each
    for figure in (whole, timeline.timeline(rows), steps.histogram(rows)):
        assert len(figure.to_json()) < 100_000
    assert sum(steps.histogram(rows).data[0].y) == pytest.approx(1)


# Checks, tables and report


class Cells:
    """A run directory of one configuration at one concurrency with three stages, written as the runner does."""

    def __init__(self, path: Path, concurrency: int = 1, others: Sequence[str] = ()) -> None:
        self.concurrency = concurrency
        self.experiment = load_experiment(BASE, [f"workload.concurrency={concurrency}", "workload.num_prompts=2"])
        first = [self.experiment.model_copy(update={"name": name}) for name in others]
        self.directory = RunDirectory(path, self.experiment, [*first, self.experiment])
        self.directory.create()

    def add(self, repeat: int, loops: list[list[StepRow]], captured: dict[str, Any] | None = None, **seen: Any) -> None:
        """A repeat whose requests, as many as are in flight, got what `seen` says: text_tokens, audio_frames,
        audio_samples, error. `name` is the configuration, if not the last one; `figures` are added to the repeat's."""
        rows = [self._request(f"r{repeat}-{index}", index, seen) for index in range(self.concurrency)]
        taken = [one for rows in loops for one in rows]
        measured = repeat_figures(rows, self.concurrency, RATE, 0.001) | seen.get("figures", {})
        measured |= {"stages": stage_figures(taken, 0.02, {}), "lost_steps": seen.get("lost", 0)}
        key = (seen.get("name", self.experiment.name), self.concurrency, repeat)
        lines = [request_line(row, RATE, self.concurrency) for row in rows]
        self.directory.add(key, measured, lines, taken, [], *((captured,) if captured else ()))

    def _request(self, name: str, index: int, seen: dict[str, Any]) -> RequestRow:
        row = RequestRow(name, index, due_ns=0, end_ns=20_000_000, reasons={"text": "stop", "audio": "stop"})
        row.text_tokens, row.audio_frames = seen.get("text_tokens", [1, 1]), seen.get("audio_frames", [4])
        row.audio_samples = seen.get("audio_samples", [4 * 1920 - 555])
        row.text_ns, row.audio_ns = [1_000_000] * len(row.text_tokens), [9_000_000] * len(row.audio_frames)
        row.error = seen.get("error")
        return row

    def load(self) -> Any:
        return load(self.directory.path)


def loops(step_gap: float = 40.0) -> list[list[StepRow]]:
    """Two text tokens, four frames, and the chunk that they make."""
    vocoder = loop([gap(step_gap, input=300)] * 2, "code2wav", "vocode", tokens=2)
    return [loop([gap(step_gap)] * 2, "thinker"), loop([gap(step_gap)] * 4), vocoder]


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    return Cells(tmp_path / "run")


def test_what_stages_gave_is_what_clients_got(cells: Cells) -> None:
    cells.add(0, loops())
    cells.add(1, loops())
    (total,) = [row for _, row in checks.totals(cells.load()).iterrows()]
    assert total["thinker_tokens"] == total["client_tokens"] == 4
    assert total["talker_frames"] == total["code2wav_frames"] == total["client_frames"] == 8
    assert total["frame_samples"] == total["client_samples"] == 2 * (4 * 1920 - 555)
    assert total["lost_steps"] == 0 and checks.differences(total) == []
    assert tables.totals(cells.load())["rows"][0][2] == {"text": "yes", "kind": "same"}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"text_tokens": [1]}, "text tokens differ by 1: the thinker's steps gave 2, clients received 1"),
        ({"audio_frames": [4, 4], "audio_samples": [7125, 7680]}, "code2wav's steps took 4, clients received 8"),
        (
            {"audio_samples": [7000]},
            "audio samples differ by 125: the clients' frames make 7,125, clients received 7,000",
        ),
    ],
)
def test_what_differs_is_told_and_counted(cells: Cells, seen: dict[str, Any], words: str) -> None:
    cells.add(0, loops(), **seen)
    run = cells.load()
    assert any(words in one for one in warnings(run))
    cell = tables.totals(run)["rows"][0][2]
    assert words in cell["text"] and cell["kind"] == "worse"


def test_failed_requests_make_totals_incomparable(cells: Cells) -> None:
    cells.add(0, loops(), text_tokens=[1], error="broken")
    assert "not comparable" in tables.totals(cells.load())["rows"][0][2]["text"]
    assert not any("differ" in one for one in warnings(cells.load()))


def test_lost_steps_make_totals_incomparable(cells: Cells) -> None:
    cells.add(0, loops(), text_tokens=[1], lost=3)
    run = cells.load()
    assert tables.totals(run)["rows"][0][2]["text"] == "not comparable: steps were lost"
    assert "3 steps were lost from the ring; 8 are in the record." in findings(run)
    assert not any("differ" in one for one in warnings(run))


def test_text_that_nobody_asked_for_is_not_compared(cells: Cells) -> None:
    cells.add(0, loops())
    run = cells.load()
    for reason in run.requests["finish_reason"]:
        del reason["text"]
    (total,) = [row for _, row in checks.totals(run).iterrows()]
    assert math.isnan(total["client_tokens"]) and checks.differences(total) == []


def test_causes_add_up_to_the_time_between_two_steps(cells: Cells) -> None:
    cells.add(0, loops(40))
    cells.add(1, loops(80))
    found = checks.sums(cells.load()).set_index("stage")
    assert found.loc["talker", ["causes_us", "between_us"]].tolist() == pytest.approx([60, 60])
    assert found.loc["code2wav", ["causes_us", "between_us"]].tolist() == pytest.approx([360, 360])
    assert found["agree"].tolist() == [True] * 3


def test_causes_that_miss_time_are_a_warning(cells: Cells) -> None:
    rows = loops()
    for step in rows[1][2:]:
        step.start_ns += 20_000
        step.end_ns += 20_000
    cells.add(0, rows)
    run = cells.load()
    assert checks.sums(run)["agree"].tolist() == [True, False, True]
    (told,) = [one for one in warnings(run) if "add up" in one]
    assert "the causes of the talker's gaps add up to 40 µs, but 46.67 µs lie between its steps" in told
    ladder = tables.gaps(run)
    verdicts = {row[0]: row[3]["text"] for row in ladder["rows"]}
    assert verdicts == {"thinker": "yes", "talker": "no", "code2wav": "yes"}


def test_the_step_gap_ladder_has_every_cause_and_their_sum(cells: Cells) -> None:
    cells.add(0, loops(40))
    table = tables.gaps(cells.load())
    vocoder = dict(zip(table["head"], table["rows"][2], strict=True))
    assert vocoder["Stage"] == "code2wav" and vocoder["Concurrency"] == "1"
    assert vocoder["Build payloads mean, µs"]["text"] == "20.0" and vocoder["Send mean, µs"]["text"] == "10.0"
    assert vocoder["Gap mean (sum of these), µs"]["text"] == "40.0" and vocoder["Gap / step, %"]["text"] == "4.00"
    assert vocoder["Gap with waiting (sum), µs"]["text"] == "340"
    assert vocoder["Between steps, by their times, µs"]["text"] == "340"


def test_the_clock_is_set_against_the_shortest_mean_step(cells: Cells) -> None:
    cells.add(0, loops())
    assert checks.clock(cells.load()) is None
    assert any("own cost: not measured" in one for one in findings(cells.load()))
    cells.directory.record["environment"] = {"step_clock_us": 1.5}
    cells.directory.write()
    found = checks.clock(cells.load())
    assert found["share"] == pytest.approx(0.0015) and found["step_ms"] == pytest.approx(1.0)
    assert any("1.5 µs a step, 0.15 % of the shortest mean step (1 ms" in one for one in findings(cells.load()))
    cells.directory.record["environment"] = {"step_clock_us": 15.0}
    cells.directory.write()
    assert any("step clock costs 15 µs a step, 1.5% of the shortest" in one for one in warnings(cells.load()))


def traces(**worker: Any) -> dict[str, Any]:
    facts = {"stage": "talker", "replica": 0, "path": "traces/talker.json.gz", "steps": 2, "stopped_by": "steps"}
    facts |= {"alignment_us": 12.0, "start_ns": 0, "end_ns": 3_000_000, "error": ""}
    return {"merged": "traces/merged.json.gz", "workers": [facts | worker]}


def test_a_captured_repeat_stands_beside_the_others(cells: Cells) -> None:
    captured = loops(90)
    captured[1][3].end_ns += 2_000_000  # the last of the talker's steps takes 3 ms; it lies behind the window
    cells.add(0, captured, traces())
    cells.add(1, loops(40))
    cells.add(2, loops(60))
    run = cells.load()
    (row,) = [row for _, row in checks.captures(run).iterrows()]
    assert (row["stage"], row["steps"], row["alignment_us"]) == ("talker", 2, 12.0)
    assert row["gap_us_median"] == pytest.approx(90)
    assert (row["other_gap_us_median"], row["other_gap_us_median_std"]) == pytest.approx((50, math.sqrt(200)))
    assert (row["step_ms"], row["other_step_ms"]) == pytest.approx((1.5, 1))
    assert (row["window_step_ms"], row["rest_step_ms"]) == pytest.approx((1, 2))
    assert any("clocks is at most 12 µs" in one for one in findings(run))
    assert row["request_throughput_per_s"] == row["other_request_throughput_per_s"] == pytest.approx(50)
    assert set(checks.counted(run, run.steps)["repeat"]) == {1, 2}
    assert not any("capture" in one for one in warnings(run)) and checks.sums(run)["agree"].all()
    assert (row["gap_us_max"], row["other_gap_us_max"]) == pytest.approx((90, 60))
    cell = dict(zip(tables.captures(run)["head"], tables.captures(run)["rows"][0], strict=True))
    assert cell["Longest gap in this repeat, µs"]["text"] == "90.0"
    assert cell["Gap median in this repeat, µs"]["text"] == "90.0" and cell["Ended by"]["text"] == "steps"


def test_figures_leave_a_captured_repeat_out_and_players_mark_it(cells: Cells) -> None:
    cells.add(0, loops(90), traces())
    cells.add(1, loops(40))
    run = cells.load()
    assert checks.counted(run, run.requests)["id"].tolist() == ["r1-0"]
    assert [len(figure.data[0].y[0]) for figure in dict(report._sections(run))["Latency"]] == [1] * 4
    assert [label for label, _ in report._walks(run)] == [f"{BASE.stem}, concurrency 1: median request (r1-0)"]
    rows = [row for _, row in run.requests.iterrows()]
    assert report._label(run, rows[0]).endswith("captured with the profiler")
    assert report._label(run, rows[1]) == f"{BASE.stem}, concurrency 1"
    assert any("one of 2 repeats counts, the other was captured" in one for one in warnings(run))


def test_a_window_without_a_step_is_not_counted(cells: Cells) -> None:
    both = traces()
    both["workers"] += traces(stage="thinker", steps=0, path="")["workers"]
    cells.add(0, loops(), both)
    cells.add(1, loops())
    (told,) = [one for one in findings(cells.load()) if "Windows captured" in one]
    assert told.startswith("Windows captured with the profiler: 1;") and "In 1 more no step" in told


def test_the_first_wave_has_a_table_and_a_warning(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "run", concurrency=2)
    cells.add(0, loops())
    run = cells.load()
    assert any("100% of the requests are of the first wave" in one for one in warnings(run))
    table = tables.first_wave(run.cells)
    row = dict(zip(table["head"], table["rows"][0], strict=True))
    assert row["Requests"]["text"] == "2" and row["E2EL mean, ms"]["text"] == "20.0"


@pytest.mark.parametrize(("shares", "told"), [((0.1, 0.34), True), ((0.1, None), False), ((None, None), False)])
def test_other_programs_are_a_reason_to_doubt(cells: Cells, shares: tuple[float | None, ...], told: bool) -> None:
    for repeat, share in enumerate(shares):
        cells.add(repeat, loops(), figures={"others_cpu_share": share})
    words = "other programs used 34 % of the processors, so times are longer than they would be alone"
    assert any(words in one for one in warnings(cells.load())) == told
    most = max((share for share in shares if share is not None), default=None)
    words = "What other programs used of the processors: not measured" if most is None else f"at most {most:.0%}"
    assert any(words.replace("%", " %") in one for one in findings(cells.load()))


def test_order_and_colours_are_those_of_the_run_in_every_table(tmp_path: Path) -> None:
    """Repeats run in alternating order and the first one of `before` was captured, so `after` is seen first."""
    cells = Cells(tmp_path / "run", others=("before",))
    after = cells.experiment.name
    cells.add(0, loops(90), traces(), name="before")
    for repeat, name in ((0, after), (1, after), (1, "before")):
        cells.add(repeat, loops(), name=name)
    run = cells.load()
    for table in (run.cells, run.stages, run.requests, run.steps):
        assert list(table["configuration"].unique()) == ["before", after]
    drawn = [figures.distribution(checks.counted(run, run.requests)), figures.by_concurrency(run.cells)]
    for figure in drawn:
        assert [trace.name for trace in figure.data] == ["before", after]
        assert [trace.marker.color for trace in figure.data] == [theme.BLUE, theme.ORANGE]
    alone = steps.histogram(run.steps[(run.steps["configuration"] == after) & (run.steps["stage"] == "talker")])
    assert alone.data[0].line.color == theme.ORANGE


def test_a_capture_that_cannot_be_judged_is_a_warning(cells: Cells) -> None:
    cells.add(0, loops(), traces(alignment_us=250.0))
    told = " ".join(warnings(cells.load()))
    assert "no repeat without a capture" in told and "within 250 µs" in told
    cell = dict(zip(tables.captures(cells.load())["head"], tables.captures(cells.load())["rows"][0], strict=True))
    assert cell["Clock error at most, µs"]["text"] == "250"
    assert cell["Step mean in the others, ms"]["kind"] == "missing"


def test_the_report_shows_steps_gaps_and_what_was_checked(cells: Cells) -> None:
    cells.add(0, loops(90), traces())
    cells.add(1, loops(40))
    html = write_report(cells.directory.path).read_text("utf-8")
    shown = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    assert "Can this be trusted?" in shown and "The step-gap ladder" in shown
    assert "add up to the time between two steps in 3 of 3 stages" in shown and "0 steps were lost" in shown
    drawn = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    titles = [json.loads(figure)["layout"]["title"]["text"] for figure in drawn]
    for stage in ("thinker", "talker", "code2wav"):
        kind = "vocode" if stage == "code2wav" else "decode"
        assert f"{stage}, concurrency 1: consecutive {kind} steps around their median gap at batch 1" in titles
        assert f"{stage}, concurrency 1: gaps before steps of any kind" in titles
        assert f"{stage}: causes of the gap between two steps, mean" in titles
    assert any("of all stages" in title for title in titles)
    assert "nan" not in shown.lower() and "Repeats in which the profiler recorded" in shown


def test_a_run_without_a_step_clock_is_reported_as_not_measured(cells: Cells) -> None:
    cells.add(0, loops())
    path = cells.directory.path
    kept = [name for name in pd.read_parquet(path / "steps.parquet") if name not in {f"{phase}_ns" for phase in PHASES}]
    pd.read_parquet(path / "steps.parquet")[kept].to_parquet(path / "steps.parquet")
    record = json.loads((path / "run.json").read_text())
    for stage in record["cells"][0]["stages"].values():
        for name in [name for name in stage if name.startswith("gap_") and name.endswith("_us")]:
            del stage[name]
    (path / "run.json").write_text(json.dumps(record))
    run = load(path)
    assert run.steps["schedule_ns"].isna().all() and tables.gaps(run) is None and warnings(run)
    assert checks.sums(run)["agree"].isna().all() and steps.gaps(run.steps).empty
    assert "Causes of the gaps against the time between two steps: not measured." in findings(run)
    assert "Steps and gaps" in write_report(path).read_text("utf-8")
