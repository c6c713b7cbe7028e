"""The latency explorer on reference results and on a run made here, driven as a notebook and a mouse drive it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import traitlets

from omni_lab.frames import Run, load
from omni_lab.run import main
from omni_lab.views import checks, figures, gantt, latency, request, theme
from omni_lab.views.latency import Limits
from omni_lab.workbench import LatencyExplorer
from omni_lab.workbench.plot import Plot
from tests.pipelines import SMALL
from tests.workbench.traffic import on_page, traffic

ROOT = Path(__file__).parents[2]

EXPERIMENT = (
    SMALL
    + """\
stages: {thinker: {sampling: {max_tokens: 12}}, talker: {sampling: {max_tokens: 9}}}
chunking: {initial_frames: 2, frames: 5, left_context: 5}
workload: {num_prompts: 3, concurrency: [1, 2], warmup: 0, repeats: 1}
results: {save_audio: 2}
"""
)


@pytest.fixture(scope="module")
def ladder() -> Run:
    return load(ROOT / "results" / "reference" / "ladder")


@pytest.fixture
def explorer(ladder: Run) -> LatencyExplorer:
    found = LatencyExplorer(ladder)
    found.configurations, found.concurrency = found.names[:2], 16
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> Run:
    where = tmp_path_factory.mktemp("explorer")
    (where / "small.yaml").write_text(EXPERIMENT)
    assert main([str(where / "small.yaml"), "--out", str(where / "run")]) == 0
    return load(where / "run")


def click(plot: Plot, trace: int, point: int) -> None:
    """What the browser sends when a point is clicked."""
    points = {"trace_indexes": [trace], "point_indexes": [point], "xs": [0], "ys": [0]}
    keys = {"alt": False, "ctrl": False, "meta": False, "shift": False, "button": 0, "buttons": 1}
    plot._js2py_pointsCallback = {"event_type": "plotly_click", "points": points, "device_state": keys}


def of(run: Run, configuration: str, concurrency: float) -> pd.DataFrame:
    rows = checks.counted(run, run.requests)
    return rows[(rows["configuration"] == configuration) & (rows["concurrency"] == concurrency)]


def test_figures_are_of_what_was_chosen(explorer: LatencyExplorer, ladder: Run) -> None:
    first, second = explorer.configurations
    explorer.metric, explorer.percentile = "audio_rtf", 90
    lines = [trace for trace in explorer.distribution.data if trace.mode == "lines"]
    assert [line.legendgroup for line in lines] == [first, second]
    for line, name in zip(lines, (first, second), strict=True):
        values = of(ladder, name, 16)["audio_rtf"]
        assert sorted(line.x) == pytest.approx(sorted(values)) and line.y[-1] == 1
        assert f"p90 {np.percentile(values, 90):.2f}"[:7] in line.name
    marks = [trace for trace in explorer.distribution.data if trace.mode == "markers"]
    assert [mark.x[0] for mark in marks] == pytest.approx(
        [np.percentile(of(ladder, name, 16)["audio_rtf"], 90) for name in (first, second)]
    )
    assert sum(len(trace.x) for trace in explorer.scatter.data) == len(explorer.chosen)
    assert set(explorer.chosen["concurrency"]) == {16} and set(explorer.chosen["configuration"]) == {first, second}
    assert ladder.record["definitions"]["audio_rtf"][:30] in explorer.definition.value
    explorer.form = "box"
    assert [trace.type for trace in explorer.distribution.data] == ["box", "box"]
    explorer.concurrency = "all"
    assert set(explorer.distribution.data[0].x) == {"1", "16", "64"} and len(explorer.table.value.split("<tr")) > 6


def test_controls_and_traits_are_the_same(explorer: LatencyExplorer) -> None:
    explorer.controls["metric"].value = "e2el_ms"
    explorer.controls["configurations"].value = (explorer.names[-1],)
    assert explorer.metric == "e2el_ms" and explorer.configurations == (explorer.names[-1],)
    assert figures.LABELS["e2el_ms"][0] in explorer.distribution.layout.title.text
    explorer.concurrency = 1
    assert explorer.controls["concurrency"].value == "1" and set(explorer.chosen["concurrency"]) == {1}
    explorer.configurations = ()
    assert explorer.distribution.layout.annotations[0].text == "not measured"


def test_a_limit_counts_the_good_answers(explorer: LatencyExplorer, ladder: Run) -> None:
    name = explorer.names[0]
    ttfp = of(ladder, name, 16)["audio_ttfp_ms"]
    explorer.controls["limit_ttfp_ms"].value = float(ttfp.median())
    explorer.limit_rtf = 1e9
    bar = explorer.bars.data[0]
    assert bar.name == name and bar.y[0] == pytest.approx((ttfp <= ttfp.median()).mean())
    assert explorer.scatter.layout.shapes[-1].x1 == explorer.limit_ttfp_ms
    cell = ladder.cells[(ladder.cells["configuration"] == name) & (ladder.cells["concurrency"] == 16)].iloc[0]
    rate = explorer.good[explorer.good["configuration"] == name]["goodput_per_s"].item()
    assert rate == pytest.approx(cell["request_throughput_per_s"] * bar.y[0])
    explorer.limit_rtf = 0.0
    assert set(explorer.good["share"]) == {0}


def test_failed_requests_keep_no_limit() -> None:
    rows = pd.DataFrame(
        {
            "configuration": pd.Categorical(["a"] * 4),
            "concurrency": [1.0] * 4,
            "audio_ttfp_ms": [10.0, 20.0, 10.0, np.nan],
            "audio_rtf": [0.1, 0.1, 0.1, np.nan],
            "e2el_ms": [30.0, 30.0, np.nan, 30.0],
        }
    )
    cells = pd.DataFrame({"configuration": ["a"], "concurrency": [1.0], "request_throughput_per_s": [6.0]})
    found = latency.goodput(rows, cells, Limits(15.0, 1.0)).iloc[0]
    assert (found["requests"], found["share"]) == (4, 0.25)
    assert found["goodput_per_s"] == pytest.approx(2.0)  # one good of three completed


def test_a_click_shows_the_request(explorer: LatencyExplorer, ladder: Run) -> None:
    click(explorer.scatter, 1, 2)
    row = ladder.requests[ladder.requests["id"] == explorer.selected].iloc[0]
    assert explorer.selected == explorer.scatter.data[1].customdata[2]
    ring = explorer.scatter.data[-1]
    assert (ring.x[0], ring.y[0]) == (row["audio_ttfp_ms"], row["audio_rtf"])
    timeline, buffer = explorer.detail.plots
    expected = request.timeline(row, ladder.steps[ladder.steps["configuration"] == row["configuration"]], ladder.chunks)
    assert [trace.name for trace in timeline.data] == [trace.name for trace in expected.data]
    assert len(buffer.data[1].x) == len(request.audio_arrivals(row)[0])
    assert "results.save_audio" in explorer.detail.words.value and row["id"] in explorer.detail.words.value
    assert explorer.list.value == explorer.selected
    explorer.list.value = ""
    assert explorer.selected is None and explorer.detail.children == () and not explorer.scatter.data[-1].x


def test_ten_minutes_of_speech_stay_a_small_figure(ladder: Run) -> None:
    """Chunks of 0.32 s, every fifth of which comes 50 ms too late; twenty thousand hand-offs."""
    row = ladder.requests.iloc[0].copy()
    count = 1875
    late = 50.0 * (np.arange(count) // 5)
    row["audio_times_ms"] = (1000.0 + 320.0 * np.arange(count) + late).tolist()
    row["audio_chunk_samples"], row["audio_duration_s"] = [7680] * count, 600.0
    figure = request.playback_buffer(row)
    marks = next(trace for trace in figure.data if trace.name.startswith("underrun"))
    assert len(marks.x) == 374 and sum(marks.customdata) == pytest.approx(50.0 * 374)
    assert len(figure.layout.shapes) == request.SHADED and f"374, the longest {request.SHADED}" in marks.name
    row["e2el_ms"] = row["audio_times_ms"][-1]
    own = request.of_request(ladder.chunks, row)
    chunks = pd.concat([own] * (20_000 // len(own)), ignore_index=True)
    figure = request.timeline(row, ladder.steps, chunks)
    received = next(trace for trace in figure.data if trace.name.startswith("hand-off received"))
    shown = pd.Series(received.y).value_counts()
    assert shown.max() <= gantt.BARS and f"({len(received.x):,} of {len(chunks):,} shown)" in received.name
    assert len(figure.to_json()) < 500_000


def test_what_is_not_there_is_refused(explorer: LatencyExplorer) -> None:
    for name, wrong, told in (
        ("configurations", ("nobody",), "nobody"),
        ("concurrency", 7, "expected one of 1, 16, 64, all"),
        ("metric", "loudness", "audio_ttfp_ms"),
        ("selected", "nobody", "no request 'nobody'"),
    ):
        before = getattr(explorer, name)
        with pytest.raises(traitlets.TraitError, match=told):
            setattr(explorer, name, wrong)
        assert getattr(explorer, name) == before


def test_a_run_made_here_can_be_heard(live: Run) -> None:
    explorer = LatencyExplorer(live, dark=True)
    explorer.concurrency = 2
    kept = live.requests[live.requests["audio_file"].notna() & (live.requests["concurrency"] == 2)].iloc[0]
    explorer.selected = kept["id"]
    (take,) = explorer.detail.player.takes
    assert len(take.samples) == sum(kept["audio_chunk_samples"]) and take.arrivals_ms == kept["audio_times_ms"]
    assert explorer.detail.player in explorer.detail.children
    silent = live.requests[live.requests["audio_file"].isna()].iloc[0]
    explorer.selected = silent["id"]
    assert explorer.detail.player is None and "that of 4 of its 6 requests" in explorer.detail.words.value
    assert explorer.scatter.layout.template.layout.paper_bgcolor == theme.template(dark=True).layout.paper_bgcolor


def test_a_page_that_comes_late_gets_the_whole_figure(explorer: LatencyExplorer) -> None:
    explorer.limit_ttfp_ms = 321.0  # a change alone, which a page that does not listen yet misses
    edits = explorer.scatter._last_trace_edit_id + explorer.scatter._last_layout_edit_id
    assert explorer.scatter._whole_at < edits
    on_page(explorer.scatter)
    assert explorer.scatter._whole_at == edits
    assert explorer.scatter._widget_layout["shapes"][-1]["x1"] == 321.0
    assert len(explorer.scatter._widget_data) == len(explorer.scatter.data)


def test_twenty_thousand_requests_stay_small_messages(ladder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = -(-20_000 // len(ladder.requests))
    many = [ladder.requests.assign(id=ladder.requests["id"] + f"-{copy}") for copy in range(copies)]
    run = dataclasses.replace(ladder, requests=pd.concat(many, ignore_index=True))
    with traffic(monkeypatch) as sent:
        explorer = LatencyExplorer(run)
        explorer.concurrency = "all"
        on_page(explorer.distribution, explorer.scatter, explorer.bars)
        del sent[:]
        for change in ({"metric": "e2el_ms"}, {"percentile": 99.0}, {"limit_ttfp_ms": 90.0}, {"form": "box"}):
            before = len(sent)
            explorer.set_trait(*change.popitem())
            assert 0 < sum(sent[before:]) < 300_000
        before = len(sent)
        click(explorer.scatter, 3, 0)
        assert 0 < sum(sent[before:]) < 1_000_000
    assert max(sent) < 500_000
    assert len(explorer.chosen) == len(run.requests) >= 20_000
    assert sum(len(trace.x) for trace in explorer.scatter.data) <= 1.1 * figures.POINTS
