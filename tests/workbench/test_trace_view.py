"""The trace view on reference results, on a capture made here, and on a trace with known answers."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import traitlets

from omni_lab.frames import Run, load
from omni_lab.metrics.phases import CAUSES, HOST, STEP
from omni_lab.run import main
from omni_lab.tracing.chrome_json import TraceError
from omni_lab.views import checks, steps
from omni_lab.views.around_gap import PIECES, around_gap, length, sentence, together
from omni_lab.views.trace_window import DEPTH, RANGES
from omni_lab.workbench import TraceView
from omni_lab.workbench.perfetto import PerfettoFrame
from tests.synthetic_traces import Program, decoder
from tests.workbench.test_explorer import EXPERIMENT, ROOT
from tests.workbench.traffic import on_page, traffic


@pytest.fixture(scope="module")
def ladder() -> Run:
    return load(ROOT / "results" / "reference" / "ladder")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> Run:
    """Two repeats, the last of which is captured with torch's profiler."""
    where = tmp_path_factory.mktemp("captured")
    (where / "small.yaml").write_text(EXPERIMENT)
    options = [
        "workload.concurrency=2",
        "workload.repeats=2",
        "profile.enabled=true",
        "profile.steps=6",
        "profile.skip_steps=2",
    ]
    settings = [part for option in options for part in ("--set", option)]
    assert main([str(where / "small.yaml"), "--out", str(where / "run"), *settings]) == 0
    return load(where / "run")


def bars(view: TraceView, name: str) -> pd.DataFrame:
    (trace,) = [one for one in view.plot.data if one.name == name]
    return pd.DataFrame({"base": trace.base, "width": trace.x, "lane": trace.y})


def test_it_starts_at_the_largest_gap_of_the_run(ladder: Run) -> None:
    view = TraceView(ladder)
    found = steps.gaps(checks.counted(ladder, ladder.steps))
    longest = found.loc[found["gap_us"].idxmax()]
    assert view.choice == {name: longest[name] for name in ("stage", "configuration", "concurrency")}
    assert view.listed.iloc[0]["gap_us"] == longest["gap_us"]
    cause = max(HOST, key=lambda name: longest[f"{name}_us"])
    share = longest[f"{cause}_us"] / longest["gap_us"]
    assert view.said.startswith(f"Largest gap of the {longest['stage']} in {longest['configuration']} at ")
    assert f": {length(longest['gap_us'])}, of which {steps.CAUSE_NAMES[cause]} " in view.said
    assert f"({100 * share:.0f} %)" in view.said and view.said in view.words.value


def test_it_zooms_on_the_gap_that_is_picked(ladder: Run) -> None:
    view = TraceView(ladder)
    view.choice = {"stage": "talker", "configuration": "async_chunk", "concurrency": 16}
    own = view.source.found.query("stage == 'talker' and configuration == 'async_chunk' and concurrency == 16")
    assert view.listed["gap_us"].tolist()[:-1] == pytest.approx(own["gap_us"].nlargest(20).tolist())
    assert view.listed.iloc[-1]["gap_us"] == pytest.approx(own["gap_us"].quantile(0.5, "higher"))
    view.list.index = 2
    row = view.listed.iloc[2]
    assert view.gap == 2 and view.said.startswith("3rd largest gap of the talker")
    whole_ms = sum(row[f"{cause}_us"] for cause in CAUSES) / 1e3
    frame = view.plot.layout.shapes[-1]
    assert (frame.x0, frame.x1) == pytest.approx((0, whole_ms))
    for cause in CAUSES:
        if row[f"{cause}_us"] > 0:
            drawn = bars(view, steps.CAUSE_NAMES[cause])
            lane = list(view.plot.layout.yaxis.ticktext).index("talker")
            inside = drawn[(drawn["lane"] == lane) & (drawn["base"] > -1e-4) & (drawn["base"] < whole_ms - 1e-4)]
            assert inside["width"].sum() == pytest.approx(row[f"{cause}_us"] / 1e3, abs=1e-4)
    assert list(view.plot.layout.yaxis.ticktext) == ["thinker", "talker", "code2wav"]
    view.next.click()
    view.next.click()
    view.previous.click()
    assert view.gap == 3 and view.list.index == 3
    view.zoom.value = 25.0
    whole_ms = sum(view.listed.iloc[3][f"{cause}_us"] for cause in CAUSES) / 1e3
    assert view.plot.layout.xaxis.range == pytest.approx((-25, whole_ms + 25))
    assert len(bars(view, "forward")) > 3
    view.gap = len(view.listed) - 1
    assert view.said.startswith("Median gap") and view.next.disabled and not view.previous.disabled


def test_waiting_counts_only_where_asked(ladder: Run) -> None:
    view = TraceView(ladder)
    view.choice = {"stage": "code2wav"}
    assert "wait for" not in view.said
    view.with_waiting.value = True
    row = view.listed.iloc[0]
    assert view.waiting and row["length_us"] == pytest.approx(sum(row[f"{cause}_us"] for cause in CAUSES))
    assert "wait for" in view.said


def test_what_is_not_there_is_refused(ladder: Run, tmp_path: Path) -> None:
    view = TraceView(ladder)
    for wrong, told in (({"stage": "vocoder"}, "expected one of thinker, talker, code2wav"), ({"stag": 1}, "'stag'")):
        with pytest.raises(traitlets.TraitError, match=told):
            view.choice = wrong
    with pytest.raises(traitlets.TraitError, match="expected 0 to 20, got 99"):
        view.gap = 99
    with pytest.raises(ValueError, match=r"steps\.parquet: expected steps"):
        TraceView(dataclasses.replace(ladder, steps=ladder.steps.iloc[:0]))
    with pytest.raises(ValueError, match=r"steps\.parquet: expected steps"):
        TraceView(dataclasses.replace(ladder, steps=ladder.steps.assign(payload_ns=np.nan)))  # an older version's
    program = Program()
    program.step(0, 10)
    with pytest.raises(TraceError, match="one step has no gap"):
        TraceView(program.write(tmp_path / "one.json"))


def test_steps_drawn_together_lose_no_time(ladder: Run) -> None:
    rows = ladder.steps[ladder.steps["stage"] == "talker"].head(1000)
    pieces = together(rows.assign(lane=0, since_ns=rows["start_ns"]))
    assert len(pieces) == PIECES and pieces["count"].sum() == 1000
    for part in (*CAUSES, *STEP):
        assert pieces[f"{part}_ns"].sum() == pytest.approx(rows[f"{part}_ns"].sum())
    gap = steps.gaps(rows).iloc[len(rows) // 2]
    figure = around_gap(ladder.steps, gap, 1e5)
    assert " steps as " in figure.layout.title.text
    assert max(len(trace.x) for trace in figure.data if trace.type == "bar") <= 3 * PIECES


def test_a_sentence_names_the_causes_in_their_order() -> None:
    told = sentence("Largest gap", 3100.0, [("build payloads", 2400.0), ("send", 400.0), ("other", 90.0)], most=2)
    assert told == "Largest gap: 3.10 ms, of which build payloads 2.40 ms (77 %), send 400 µs (13 %)"


def test_a_capture_is_shown_with_all_stages(captured: Run) -> None:
    view = TraceView(captured)
    view.choice = {"stage": "talker"}
    assert view.perfetto.layout.display is None
    view.perfetto.click()
    (frame,) = view.frame.children
    events = json.loads(gzip.decompress(frame.trace))["traceEvents"]
    assert frame.title == "merged.json.gz" and any(event.get("cat") == "step_clock" for event in events)
    traces = TraceView(captured.path / "traces")
    labels = [label for label, _ in traces.source.choices["worker"]]
    assert {"thinker_r0", "talker_r0"} <= set(labels)
    traces.choice = {"worker": "talker_r0"}
    traces.context_ms = 500.0
    lanes = list(traces.plot.layout.yaxis.ticktext)
    assert lanes[0].startswith("talker_r0") and any(lane.startswith("thinker_r0") for lane in lanes)
    assert any(name.startswith("step ") for name in traces.plot.data[0].customdata[:, 0])


def test_a_trace_with_known_answers(tmp_path: Path) -> None:
    """Each gap of the device is 300 µs, of which 200 are detokenize and 10 synchronization."""
    view = TraceView(decoder(11).write(tmp_path / "plain.json"))
    assert view.said.startswith(
        "Largest gap of plain: 300 µs, of which detokenize 200 µs (67 %), (nothing recorded) 70"
    )
    assert "batch" in view.words.value and view.plot.layout.title.text == "plain: around a gap of 300 µs"
    view.context_ms = 0.5
    detokenize = next(trace for trace in view.plot.data if trace.name == "range")
    names = detokenize.customdata[:, 0].tolist()
    inside = [
        (name, base, width)
        for name, base, width in zip(names, detokenize.base, detokenize.x, strict=True)
        if name == "detokenize" and -1e-6 <= base <= 0.3
    ]
    assert [(base, width) for _, base, width in inside] == [(pytest.approx(0.03), pytest.approx(0.2))]
    lanes = list(view.plot.layout.yaxis.ticktext)
    assert lanes == ["python, thread 4243", "device 0"]
    assert view.plot.layout.xaxis.range == pytest.approx((-0.5, 0.8))
    view.waiting = False
    assert "cudaStreamSynchronize" not in view.said and "290 µs" in view.said


def test_deep_and_many_ranges_are_left_out_and_counted(tmp_path: Path) -> None:
    program = Program()
    for index in range(40):
        at = 10_000 * index
        program.step(at, at + 9_000)
        for level in range(DEPTH + 4):
            program.range(f"level {level}", at + 10 + level, at + 8_900 - level, "python_function")
        for part in range(100):
            program.range("small", at + 100 + 50 * part, at + 110 + 50 * part)
    view = TraceView(program.write(tmp_path / "deep.json"))
    view.context_ms = 2000.0
    drawn = sum(len(trace.x) for trace in view.plot.data)
    assert drawn <= RANGES and f"the longest {drawn:,} of " in view.plot.layout.title.text


def test_perfetto_gets_the_file_compressed(tmp_path: Path) -> None:
    file = decoder(3).write(tmp_path / "a.json")
    assert gzip.decompress(PerfettoFrame(file).trace) == file.read_bytes()
    packed = decoder(3).write(tmp_path / "b.json.gz")
    assert PerfettoFrame(packed).trace == packed.read_bytes()
    with pytest.raises(OSError, match=r"c\.json"):
        PerfettoFrame(tmp_path / "c.json")


def test_a_trace_that_is_gone_is_told_beside_the_button(tmp_path: Path) -> None:
    file = decoder(11).write(tmp_path / "gone.json")
    view = TraceView(file)
    file.unlink()
    view.perfetto.click()
    assert "gone.json" in view.frame.children[0].value


def test_a_hundred_thousand_steps_stay_small_messages(ladder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = -(-100_000 // len(ladder.steps))
    many = [ladder.steps.assign(repeat=ladder.steps["repeat"] + 10 * copy) for copy in range(copies)]
    repeats = {10 * copy + repeat for copy in range(copies) for repeat in ladder.steps["repeat"].unique()}
    cells = [{**cell, "runs": [{"repeat": repeat} for repeat in repeats]} for cell in ladder.record["cells"]]
    run = dataclasses.replace(
        ladder, steps=pd.concat(many, ignore_index=True), record={**ladder.record, "cells": cells}
    )
    with traffic(monkeypatch) as sent:
        view = TraceView(run)
        on_page(view.plot)
        other = {"stage": "thinker" if view.choice["stage"] == "talker" else "talker", "concurrency": 64.0}
        for change in ({"gap": 3}, {"context_ms": 2000.0}, {"choice": other}):
            before = len(sent)
            view.set_trait(*change.popitem())
            assert 0 < sum(sent[before:]) < 300_000
    assert len(view.source.steps) >= 100_000 and np.isfinite(view.median_us)
