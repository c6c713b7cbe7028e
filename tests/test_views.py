"""Tables, figures and report of a run directory, written here in the form of the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import soundfile

from omni_lab.frames import load
from omni_lab.metrics.continuity import underrun_s
from omni_lab.metrics.relative import compare
from omni_lab.metrics.table import ratio_table
from omni_lab.views import figures, gantt, ladder, request, tables, theme
from omni_lab.views.report import PLAYERS, waveform, write_report
from omni_lab.views.trust import warnings

STAGES = ("thinker", "talker", "code2wav")
RATE = 24_000
EPOCH = 5_000_000_000_000
METRICS = ("ttft_ms", "tpot_ms", "e2el_ms", "audio_ttfp_ms", "audio_rtf", "audio_duration_s", "audio_underrun_s")


class RunWriter:
    """Writes a run directory like that of a three-stage pipeline whose speed depends on the load."""

    def __init__(self, path: Path, **experiment: Any) -> None:
        self.path, self.now = path, EPOCH
        self.random = np.random.default_rng(0)
        self.experiment = {
            "name": "ladder",
            "executor": "process",
            "stages": {stage: {} for stage in STAGES},
            **experiment,
        }
        self.noise = (0.98, 1.0, 1.02)
        """What the figures of each repeat are multiplied by."""
        self.cells: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []

    def cell(
        self, configuration: str, concurrency: int | None, requests: int, slow: float = 1.0, audio: int = 2
    ) -> None:
        key = {"configuration": configuration, "concurrency": concurrency, "repeat": 0}
        in_flight = concurrency or 2
        rows = [self._request(key, i, in_flight, slow * (1 + 0.08 * in_flight), i < audio) for i in range(requests)]
        cell: dict[str, Any] = {**key, "repeats": 3, "completed": requests, "failed": 0, "duration": 0.5 * requests}
        del cell["repeat"]
        for name in METRICS:
            values = [row[name] for row in rows if row[name] is not None]
            cell |= {f"mean_{name}": np.mean(values), f"mean_{name}_std": 0.03 * np.mean(values)}
            cell |= {f"median_{name}": np.median(values), f"p99_{name}": np.percentile(values, 99)}
        rate = 1000 * in_flight / cell["mean_e2el_ms"]
        audio_rate = rate * cell["mean_audio_duration_s"]
        cell |= {"request_throughput": rate, "request_throughput_std": 0.02 * rate, "audio_throughput": audio_rate}
        cell |= {"output_throughput": None, "hit_max_frames": 0, "mean_requests_in_flight": float(in_flight)}
        cell |= {"littles_law_ratio": 1.0, "client_busy_share": 0.1, "audio_continuity_ok_rate": 0.97}
        cell["first_wave"] = {"completed": concurrency or 0, "mean_audio_ttfp_ms": cell["mean_audio_ttfp_ms"] * 1.4}
        cell["stages"] = {
            stage: {"steps": 100 * requests, "mean_batch": 0.8 * in_flight, "step_ms": step, "gap_us_median": 90.0,
                    "gap_us_p99": 800.0, "busy_ratio": min(1.0, 0.3 * step), "tokens_per_s": 400.0 * in_flight}
            for stage, step in (("code2wav", 3.1), ("talker", 2.4), ("thinker", 0.9))
        }  # fmt: skip
        self.cells.append(cell)

    def _request(self, key: dict[str, Any], index: int, in_flight: int, slow: float, saved: bool) -> dict[str, Any]:
        send, frames, tokens = self.now, int(self.random.integers(20, 60)), int(self.random.integers(8, 20))
        id_ = f"{key['configuration']}-{key['concurrency']}-{index:04d}"
        jitter = slow * self.random.uniform(0.8, 1.4)
        self._steps(key, "thinker", send, [("prefill", 1)] + [("decode", 1)] * (tokens - 1), 1.0 * jitter, in_flight)
        talking = send + int(6e6 * jitter)
        self._steps(key, "talker", talking, [("prefill", 0)] + [("decode", 1)] * frames, 2.4 * jitter, in_flight)
        sizes = [4] + [25] * ((frames - 4) // 25) + ([(frames - 4) % 25] if (frames - 4) % 25 else [])
        done = np.cumsum(sizes)
        self._chunk(key, "client->thinker", id_, 0, 0, send, True)
        for i in range(tokens):
            at = send + int((i + 2) * 1e6 * jitter)
            self._chunk(key, "thinker->client", id_, i, 0, at, i == tokens - 1)
            self._chunk(key, "thinker->talker", id_, i, 0, at, i == tokens - 1)
        arrivals = []
        for i, (size, count) in enumerate(zip(sizes, done, strict=True)):
            produced = talking + int(count * 2.5e6 * jitter)
            self._chunk(key, "talker->code2wav", id_, i, size, produced, i == len(sizes) - 1)
            self._steps(key, "code2wav", produced + 400_000, [("vocode", size)], 12.0, in_flight)
            arrivals.append(
                self._chunk(key, "code2wav->client", id_, i, size, produced + 13_000_000, i == len(sizes) - 1)
            )
        audio_s = (1920 * frames - 555) / RATE
        row = {**key, "id": id_, "index": index, "text": f"Sentence {index} <b>said</b> & spoken.", "send_ns": send}
        row |= {"ttft_ms": 2 * jitter, "tpot_ms": jitter, "audio_duration_s": audio_s}
        row |= {"audio_ttfp_ms": (arrivals[0] - send) / 1e6, "e2el_ms": (arrivals[-1] - send) / 1e6 + 0.2}
        row |= {"audio_rtf": (arrivals[-1] - send) / 1e9 / audio_s, "prompt_tokens": 30, "text_tokens": tokens}
        row |= {
            "codec_frames": frames,
            "finish_reason": {"text": "stop", "audio": "stop"},
            "error": None,
            "speaker": "aria",
            "audio_file": None,
        }
        row |= {"audio_times_ms": [(at - send) / 1e6 for at in arrivals]}
        row |= {"audio_chunk_samples": [1920 * size - 555 * (i == 0) for i, size in enumerate(sizes)]}
        row |= {"audio_underrun_s": 0.0, "first_wave": index < in_flight}
        if saved:
            row["audio_file"] = f"audio/{id_}.flac"
            (self.path / "audio").mkdir(parents=True, exist_ok=True)
            time = np.arange(1920 * frames - 555) / RATE
            wave = 0.5 * np.sin(2 * np.pi * 180 * time) * np.sin(2 * np.pi * 2.1 * time) ** 2
            wave += 0.05 * self.random.standard_normal(len(time)) * (np.sin(2 * np.pi * 2.1 * time) ** 2)
            soundfile.write(self.path / row["audio_file"], wave.astype(np.float32), RATE)
        self.requests.append(row)
        self.now = arrivals[-1] + 1_000_000
        return row

    def _steps(self, key: dict, stage: str, at: int, kinds: list[tuple[str, int]], step_ms: float, batch: int) -> None:
        for kind, tokens in kinds:
            end = at + int(step_ms * 1e6 * (3 if kind == "prefill" else 1))
            row = {"stage": stage, "replica": 0, "step": len(self.steps), "start_ns": at, "end_ns": end}
            self.steps.append({**key, **row, "batch": batch, "tokens": tokens, "kind": kind})
            at = end + 90_000

    def _chunk(self, key: dict, edge: str, request_: str, index: int, frames: int, produced: int, final: bool) -> int:
        row = {"edge": edge, "request": request_, "index": index, "frames": frames, "bytes": 64 + 7680 * frames}
        times = {"produced_ns": produced, "sent_ns": produced + 50_000, "received_ns": produced + 300_000}
        self.chunks.append({**key, **row, **times, "final": final})
        return times["received_ns"]

    def write(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        for cell in self.cells:
            figures_ = {name: value for name, value in cell.items() if isinstance(value, float) and "_std" not in name}
            cell["runs"] = [
                {name: value * factor for name, value in figures_.items()} | {"repeat": repeat}
                for repeat, factor in enumerate(self.noise)
            ]
        if self.cells:
            compare(self.cells, self.cells[0]["configuration"])
        record = {"schema_version": 1, "experiment": self.experiment, "cells": self.cells}
        record |= {
            "definitions": {"audio_ttfp_ms": "Time to first packet."},
            "environment": {"python": "3.11", "threads": 1},
        }
        (self.path / "run.json").write_text(json.dumps(record, default=float))
        (self.path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.requests))
        for name, rows in (("steps", self.steps), ("chunks", self.chunks)):
            if rows:
                pd.DataFrame(rows).to_parquet(self.path / f"{name}.parquet")
        return self.path


def two_rungs(path: Path) -> RunWriter:
    writer = RunWriter(path)
    for configuration, slow in (("batch", 3.0), ("async_output", 1.0)):
        for concurrency in (1, 4):
            writer.cell(configuration, concurrency, requests=17, slow=slow)
    return writer


@pytest.fixture
def ladder_run(tmp_path: Path) -> RunWriter:
    """A run to be changed."""
    return two_rungs(tmp_path / "ladder")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> RunWriter:
    """A run that is only read."""
    writer = two_rungs(tmp_path_factory.mktemp("views") / "ladder")
    writer.write()
    return writer


@pytest.fixture(scope="module")
def html(written: RunWriter) -> str:
    """Its report."""
    return write_report(written.path).read_text("utf-8")


def page(writer: RunWriter) -> str:
    return write_report(writer.write()).read_text("utf-8")


def visible(html: str) -> str:
    """The page without its scripts, styles and recordings."""
    html = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"base64,[A-Za-z0-9+/=]+", "base64,", html)


def embedded_figures(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)]


# Tables


def test_load_gives_a_row_for_each_thing_with_units(written: RunWriter) -> None:
    run = load(written.path)
    assert len(run.cells) == 4 and len(run.stages) == 12 and len(run.requests) == 68
    assert len(run.steps) == len(written.steps) and len(run.chunks) == len(written.chunks)
    cell = run.cells.iloc[0]
    assert cell["request_throughput_per_s"] == pytest.approx(written.cells[0]["request_throughput"])
    assert cell["request_throughput_per_s_std"] == pytest.approx(written.cells[0]["request_throughput_std"])
    assert {"duration_s", "audio_throughput_s_per_s", "first_wave_completed"} <= set(run.cells.columns)
    assert "request_throughput" not in run.cells and "duration" not in run.cells
    assert run.stages["stage"].tolist() == 4 * list(STAGES)


def test_null_is_nan_in_a_column_of_numbers(ladder_run: RunWriter) -> None:
    ladder_run.requests[0]["audio_rtf"] = None
    run = load(ladder_run.write())
    assert run.cells["output_throughput_tokens_per_s"].dtype == float
    assert run.cells["output_throughput_tokens_per_s"].isna().all()
    assert run.requests["audio_rtf"].dtype == float and run.requests["audio_rtf"].isna().sum() == 1


def test_load_without_steps_and_chunks(ladder_run: RunWriter) -> None:
    path = ladder_run.write()
    (path / "steps.parquet").unlink()
    (path / "chunks.parquet").unlink()
    run = load(path)
    assert run.steps.empty and run.chunks.empty and "idle_ns" in run.steps and "edge" in run.chunks


def test_load_names_the_file_that_is_wrong(ladder_run: RunWriter, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        load(tmp_path)
    path = ladder_run.write()
    lines = (path / "requests.jsonl").read_text().splitlines()
    (path / "requests.jsonl").write_text("\n".join([lines[0], lines[1][:20]]))
    with pytest.raises(ValueError, match=r"requests\.jsonl, line 2"):
        load(path)
    (path / "requests.jsonl").write_text(lines[0])
    (path / "steps.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"steps\.parquet"):
        load(path)


# Figures


def test_distribution_has_the_quantiles_of_each_cell(written: RunWriter) -> None:
    run = load(written.path)
    figure = figures.distribution(run.requests, "audio_ttfp_ms")
    assert isinstance(figure, go.Figure) and [trace.name for trace in figure.data] == ["batch", "async_output"]
    trace = figure.data[1]
    own = run.requests[(run.requests["configuration"] == "async_output") & (run.requests["concurrency"] == 4)]
    assert list(trace.x) == ["1", "4"]
    assert trace.median[1] == pytest.approx(own["audio_ttfp_ms"].median())
    assert trace.upperfence[1] == pytest.approx(own["audio_ttfp_ms"].quantile(0.99))


def test_real_time_line_stands_at_one_on_a_log_axis_too(ladder_run: RunWriter) -> None:
    for row in ladder_run.requests[:5]:
        row["audio_rtf"] /= 100
    figure = figures.distribution(load(ladder_run.write()).requests, "audio_rtf")
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.shapes[0].y0 == 1 and figure.layout.annotations[0].y == 0


def test_by_concurrency_draws_the_spread_of_the_repeats(written: RunWriter) -> None:
    run = load(written.path)
    figure = figures.by_concurrency(run.cells.iloc[::-1], "request_throughput_per_s")
    batch = next(trace for trace in figure.data if trace.name == "batch")
    assert list(batch.x) == ["1", "4"]
    assert list(batch.y) == pytest.approx([cell["request_throughput"] for cell in written.cells[:2]])
    assert list(batch.error_y.array) == pytest.approx([cell["request_throughput_std"] for cell in written.cells[:2]])


def test_scatter_shows_measured_requests_and_marks_the_first_wave(ladder_run: RunWriter) -> None:
    ladder_run.requests[0]["audio_ttfp_ms"] = None
    figure = figures.ttfp_rtf(load(ladder_run.write()).requests)
    assert sum(len(trace.x) for trace in figure.data) == 67
    assert sum(symbol.endswith("-open") for trace in figure.data for symbol in trace.marker.symbol) == 1 + 4 + 1 + 4 - 1


def test_scatter_is_thinned_and_keeps_the_extremes() -> None:
    count = 5000
    table = {"id": [str(i) for i in range(count)], "configuration": "a", "concurrency": 1, "audio_rtf": 0.5}
    figure = figures.ttfp_rtf(pd.DataFrame({**table, "audio_ttfp_ms": np.arange(count, dtype=float)}))
    assert len(figure.data[0].x) == figures.POINTS and min(figure.data[0].x) == 0 and max(figure.data[0].x) == count - 1


def test_stage_bars_has_a_trace_for_each_stage_in_pipeline_order(written: RunWriter) -> None:
    figure = figures.stage_bars(load(written.path).stages, "step_ms")
    assert [trace.name for trace in figure.data] == list(STAGES)
    assert list(figure.data[1].y) == [2.4] * 4 and len(figure.data[1].x) == 2


@pytest.mark.parametrize("draw", [figures.distribution, figures.by_concurrency, figures.ttfp_rtf, figures.stage_bars])
def test_a_figure_without_data_says_so(draw: Any) -> None:
    frame = pd.DataFrame({"configuration": ["a"], "concurrency": [1]})
    figure = draw(frame)
    assert not figure.data and figure.layout.annotations[0].text == "not measured"


def test_open_loop_has_a_place_on_the_axis(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "open")
    writer.cell("async_output", None, requests=4)
    run = load(writer.write())
    assert figures.by_concurrency(run.cells, "request_throughput_per_s").data[0].x[0] == "open"
    assert figures.distribution(run.requests, "e2el_ms").data[0].x[0] == "open"
    assert sum(len(trace.x) for trace in figures.ttfp_rtf(run.requests).data) == 4
    assert "open" in visible(page(writer))


def test_timeline_shows_steps_and_handoffs_of_one_request(written: RunWriter) -> None:
    run = load(written.path)
    row = run.requests.iloc[20]
    figure = request.timeline(row, run.steps, run.chunks)
    own = run.chunks[run.chunks["request"] == row["id"]]
    (received,) = [trace for trace in figure.data if trace.name == "hand-off received"]
    assert list(received.x) == pytest.approx(((own["received_ns"] - row["send_ns"]) / 1e6).sort_values().tolist())
    assert set(received.y) == set(own["edge"])
    end_ns = row["send_ns"] + row["e2el_ms"] * 1e6
    overlapping = run.steps[(run.steps["end_ns"] >= row["send_ns"]) & (run.steps["start_ns"] <= end_ns)]
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.name in ("prefill", "decode", "vocode")]
    assert sum(len(trace.x) for trace in bars) == len(overlapping)
    assert list(figure.layout.yaxis.categoryarray)[::-1] == [
        "client",
        "client->thinker",
        "thinker",
        "thinker->client",
        "thinker->talker",
        "talker",
        "talker->code2wav",
        "code2wav",
        "code2wav->client",
    ]


def test_timeline_draws_many_steps_together_and_loses_no_busy_time(written: RunWriter) -> None:
    run = load(written.path)
    row = run.requests.iloc[0].copy()
    row["e2el_ms"] = (run.steps["end_ns"].max() - row["send_ns"]) / 1e6
    (bars,) = [trace for trace in request.timeline(row, run.steps, run.chunks).data if trace.name == "decode"]
    decodes = run.steps[run.steps["kind"] == "decode"]
    assert gantt.BARS < len(bars.x) <= 2 * gantt.BARS < len(decodes)
    busy_ms = (decodes["end_ns"] - decodes["start_ns"]).sum() / 1e6
    assert bars.customdata[:, 1].sum() == pytest.approx(busy_ms, rel=1e-3)
    assert bars.customdata[:, 2].sum() == len(decodes)


def test_playback_of_known_chunks() -> None:
    played = request.playback(np.array([100.0, 300.0, 2000.0]), np.array([0.5, 1.0, 1.0]))
    assert played.underruns_ms.tolist() == [[1600.0, 2000.0]]
    assert played.times_ms.tolist() == [100, 100, 300, 300, 1600, 2000, 2000, 3000]
    assert played.level_s == pytest.approx([0, 0.5, 0.3, 1.3, 0, 0, 1, 0])


def test_playback_is_silent_as_long_as_the_metric_says() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        arrivals = np.sort(random.uniform(0, 5000, 12))
        durations = random.uniform(0.05, 0.6, 12)
        silent_ms = np.diff(request.playback(arrivals, durations).underruns_ms).sum()
        assert silent_ms / 1000 == pytest.approx(underrun_s(arrivals / 1000, durations), abs=1e-9)


def test_playback_buffer_marks_underruns() -> None:
    row = pd.Series({"audio_times_ms": [100.0, 900.0, 950.0], "audio_chunk_samples": [2400, 4800, 0]})
    row["audio_duration_s"] = 0.3
    figure = request.playback_buffer(row)
    assert [trace.name for trace in figure.data] == ["buffer", "chunk arrives", "underrun"]
    assert len(figure.data[1].x) == 2
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == pytest.approx((200, 900))


def test_playback_buffer_of_a_text_answer_says_so() -> None:
    figure = request.playback_buffer(pd.Series({"audio_times_ms": [], "audio_chunk_samples": []}))
    assert figure.layout.annotations[0].text == "not measured"


def test_both_templates_are_registered_and_keep_the_data_colours() -> None:
    light, dark = theme.template(), theme.template(dark=True)
    assert light.layout.colorway == dark.layout.colorway == theme.PALETTE
    assert light.layout.paper_bgcolor != dark.layout.paper_bgcolor
    assert go.Figure(layout={"template": theme.DARK}).layout.template.layout.font.color == dark.layout.font.color


# Report


def test_report_refers_to_nothing_outside(html: str) -> None:
    shown = visible(html)
    assert "http:" not in shown and "https:" not in shown and "//" not in re.sub(r"base64,", "", shown)
    for source in re.findall(r"""(?:src|href|poster|action|data)=["']([^"']*)""", shown):
        assert source.startswith(("data:", "#")), source
    assert "<script src" not in html and "<link" not in html and "default-src 'none'" in html
    assert html.count("plotly.js v") == 1


def test_report_shows_every_cell_and_its_ratios(written: RunWriter, html: str) -> None:
    shown = visible(html)
    tables = re.findall(r"<tbody>(.*?)</tbody>", shown, re.DOTALL)
    for cell in written.cells:
        key = rf'<th scope="row">{cell["configuration"]}</th><th scope="row">{cell["concurrency"]}</th>'
        assert re.search(key, tables[0])
        assert f"{cell['mean_audio_ttfp_ms']:.3g}" in tables[0]
    expected = written.cells[2]["mean_audio_ttfp_ms"] / written.cells[0]["mean_audio_ttfp_ms"]
    assert f'<td class="better">{expected:.3g}x ({expected:.3g} to {expected:.3g})</td>' in tables[1]
    assert "Ratio to batch" in shown


def test_difference_inside_the_noise_is_called_none(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "same")
    writer.cell("batch", 1, requests=4)
    writer.cell("async_output", 1, requests=4)
    path = writer.write()
    record = json.loads((path / "run.json").read_text())
    for cell, values in zip(record["cells"], ((100, 104, 98), (101, 102, 100)), strict=True):
        for run, value in zip(cell["runs"], values, strict=True):
            run["mean_e2el_ms"] = value
    compare(record["cells"], "batch")
    (path / "run.json").write_text(json.dumps(record))
    found = record["cells"][1]["relative"]["mean_e2el_ms"]
    assert found["low"] < 1 < found["high"]
    words = f"none: {found['ratio']:.3g}x ({found['low']:.3g} to {found['high']:.3g})"
    assert f'<td class="same">{words}</td>' in visible(write_report(path).read_text("utf-8"))


def test_one_repeat_has_a_ratio_and_no_verdict(ladder_run: RunWriter) -> None:
    ladder_run.noise = (1.0,)
    assert "x (too few repeats)</td>" in visible(page(ladder_run))
    assert re.search(r"x0\.\d+\?.*\n\?: too few repeats for an interval", ratio_table(ladder_run.cells), re.DOTALL)


def test_one_configuration_has_no_ratios(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "one")
    writer.cell("async_output", 1, requests=3)
    assert "Ratio to" not in visible(page(writer))


def test_null_is_not_measured_and_never_zero(ladder_run: RunWriter) -> None:
    ladder_run.cells[0]["mean_ttft_ms"] = None
    shown = visible(page(ladder_run))
    row = re.search(r'<tr><th scope="row">batch</th><th scope="row">1</th>(.*?)</tr>', shown, re.DOTALL).group(1)
    head = re.findall(r'<th scope="col">(.*?)</th>', shown)
    values = re.findall(r'<td class="(\w+)">(.*?)</td>', row)
    assert values[head.index("TTFT mean, ms") - 2] == ("missing", "not measured")
    assert values[head.index("Tokens / s") - 2] == ("missing", "not measured")
    assert values[head.index("Failed") - 2] == ("figure", "0")
    assert "nan" not in shown.lower().replace("nano", "")


def test_recordings_are_embedded_with_text_and_waveform(html: str) -> None:
    assert html.count("<audio ") == 8 and "8 of 8 saved recordings" in html
    assert html.count("data:audio/flac;base64,ZkxhQ") == 8  # "fLaC"
    assert "Sentence 0 &lt;b&gt;said&lt;/b&gt; &amp; spoken." in html and "<b>said</b>" not in visible(html)


def test_at_most_sixteen_recordings_from_all_cells(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "many")
    for concurrency in (1, 2, 4):
        writer.cell("async_output", concurrency, requests=10, audio=10)
    html = page(writer)
    assert html.count("<audio ") == PLAYERS and f"{PLAYERS} of 30 saved recordings" in html
    for concurrency in (1, 2, 4):
        assert html.count(f"<figcaption>async_output, concurrency {concurrency} ") >= 5


def test_a_missing_recording_is_an_error_that_names_it(ladder_run: RunWriter) -> None:
    path = ladder_run.write()
    (path / ladder_run.requests[0]["audio_file"]).unlink()
    with pytest.raises(FileNotFoundError, match="batch-1-0000"):
        write_report(path)


def test_waveform_is_the_outline_of_the_sound(tmp_path: Path) -> None:
    samples = np.zeros(4000, dtype=np.float32)
    samples[2000:] = np.tile([0.5, -0.25], 1000)
    soundfile.write(tmp_path / "a.flac", samples, RATE)
    path = waveform((tmp_path / "a.flac").read_bytes())
    heights = [float(point.split(",")[1]) for point in path.strip("MZ").split("L")]
    assert len(heights) == 400 and path.startswith("M0.0,1.000")
    assert heights[:100] == [1.0] * 100 and heights[100:200] == pytest.approx([0.5] * 100, abs=1e-3)
    assert heights[200:300] == pytest.approx([1.25] * 100, abs=1e-3)


def test_report_of_a_run_without_audio_steps_and_chunks(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "bare")
    writer.cell("server", 2, requests=5, audio=0)
    writer.cells[0]["stages"] = {}
    path = writer.write()
    (path / "steps.parquet").unlink()
    (path / "chunks.parquet").unlink()
    shown = visible(write_report(path).read_text())
    assert "No recording was saved." in shown and "Stages: not measured." in shown


def test_report_of_a_run_in_which_everything_failed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "failed")
    writer.cell("batch", 1, requests=2, audio=0)
    for row in writer.requests:
        row |= dict.fromkeys((*METRICS, "audio_file")) | {"error": "thinker: out of memory"}
    writer.cells[0] |= {f"mean_{name}": None for name in METRICS} | {"completed": 0, "failed": 2}
    shown = visible(page(writer))
    assert "no request was completed" in shown and "2 of 2 requests failed" in shown


def test_report_of_a_run_without_cells(tmp_path: Path) -> None:
    assert "no finished cell" in visible(page(RunWriter(tmp_path / "none")))


def test_text_cannot_break_out_of_the_page(ladder_run: RunWriter) -> None:
    for row in ladder_run.requests:
        row["text"] = row["id"] = "</script><script>alert(1)</script>"
    html = page(ladder_run)
    assert "<script>alert" not in html
    assert len(embedded_figures(html)) > 12


def test_figures_in_the_page_leave_their_colours_to_its_theme(html: str) -> None:
    drawn = embedded_figures(html)
    assert drawn and all("template" not in figure["layout"] for figure in drawn)


def test_effective_experiment_environment_and_definitions_are_shown(html: str) -> None:
    shown = visible(html)
    assert "executor: process" in shown and "threads: 1" in shown and "Time to first packet." in shown


def test_large_run_makes_a_report_of_reasonable_size(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "large")
    for configuration in ("batch", "async_output"):
        for concurrency in (1, 64):
            writer.cell(configuration, concurrency, requests=500, audio=16)
    pad = [{**row, "id": f"{row['id']}-{i}", "audio_file": None} for i in range(2) for row in writer.requests]
    writer.requests += pad
    path = writer.write()
    assert len(writer.requests) >= 5000 and len(writer.steps) >= 100_000
    assert write_report(path).stat().st_size < 12e6


# The ladder


def test_published_ladder_is_a_row_for_each_rung_and_concurrency() -> None:
    """The numbers stand on their own here, so that a slip in the data file is seen."""
    rows = ladder.published().set_index(["configuration", "concurrency"])
    assert len(rows) == 20 and not rows.isna().any(axis=None)
    assert rows["request_throughput_per_s"].loc["async_output"].tolist() == [1.91, 3.49, 6.55, 11.3]
    assert rows["mean_audio_ttfp_ms"].loc["cuda_graph"].tolist() == [745, 1624, 1932, 2790]
    assert rows["mean_audio_rtf"].loc["batch"].tolist() == [0.82, 0.93, 0.99, 1.15]


@pytest.mark.parametrize("metric", ladder.METRICS)
def test_ladder_figure_has_ours_and_the_published_in_every_panel(written: RunWriter, metric: str) -> None:
    figure = ladder.figure(load(written.path).cells, metric)
    assert [trace.name for trace in figure.data] == ["published", "this run", "this run"]  # nothing published at 4
    stated, own, own_at_4 = figure.data
    name = {"request_throughput_per_s": "request_throughput"}.get(metric, metric)
    assert list(own.y) == pytest.approx([written.cells[0][name], written.cells[2][name]])
    assert list(own_at_4.y) == pytest.approx([written.cells[1][name], written.cells[3][name]])
    both = ladder.published().query("concurrency == 1 and configuration in ('batch', 'async_output')")
    assert list(stated.x) == list(own.x) == ["batch", "async_output"] and list(stated.y) == both[metric].tolist()
    assert figure.layout.yaxis.type == "log" and stated.line.color != own.line.color


def test_ladder_table_has_the_ratios_of_both(written: RunWriter) -> None:
    table = tables.ladder(load(written.path))
    row = next(row for row in table["rows"] if row[:2] == ["async_output", "1"])
    cell = dict(zip(table["head"], row, strict=True))
    assert cell["Requests / s, published"]["text"] == "1.91"
    assert cell["Requests / s against batch, published"]["text"] == f"{1.91 / 0.29:.3g}x"
    ratio = written.cells[2]["request_throughput"] / written.cells[0]["request_throughput"]
    assert cell["Requests / s against batch"] == {
        "text": f"{ratio:.3g}x ({ratio:.3g} to {ratio:.3g})",
        "kind": "better",
    }
    assert cell["Talker step gap, median, µs"]["text"] == "90.0"
    base = next(row for row in table["rows"] if row[:2] == ["batch", "1"])
    assert dict(zip(table["head"], base, strict=True))["TTFP mean against batch"]["text"] == "1x"
    other = next(row for row in table["rows"] if row[:2] == ["async_output", "4"])
    assert dict(zip(table["head"], other, strict=True))["RTF mean, published"]["kind"] == "missing"


def test_report_of_a_ladder_says_what_can_be_compared(html: str, tmp_path: Path) -> None:
    shown = visible(html)
    assert "<h2>The ladder</h2>" in shown and ladder.COMPARABLE in shown and "vllm-project.github.io" in shown
    writer = RunWriter(tmp_path / "pair")
    writer.cell("transformers", 1, requests=3)
    writer.cell("full", 1, requests=3)
    assert "The ladder" not in visible(page(writer))


# Warnings


def test_a_sound_run_has_no_warning(written: RunWriter) -> None:
    assert warnings(load(written.path)) == []


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("failed", 3, "3 of 20 requests failed"),
        ("client_busy_share", 0.8, "client was busy 80%"),
        ("littles_law_ratio", 0.7, "Little's law"),
        ("hit_max_frames", 2, "2 answers was cut"),
        ("lost_steps", 9, "9 steps were not recorded"),
        ("first_wave", {"completed": 16}, "94% of the requests are of the first wave"),
        ("repeats", 1, "one repeat only"),
    ],
)
def test_each_reason_to_doubt_is_a_warning(ladder_run: RunWriter, figure: str, value: Any, words: str) -> None:
    ladder_run.cells[1][figure] = value
    found = warnings(load(ladder_run.write()))
    assert len(found) == 1 and words in found[0] and found[0].startswith("batch, concurrency 4: ")


def test_warnings_stand_at_the_top_of_the_report(ladder_run: RunWriter, html: str) -> None:
    ladder_run.cells[1]["failed"] = 3
    assert "3 of 20 requests failed" in visible(page(ladder_run)).partition("<h2>")[0]
    assert 'aria-label="Warnings"' not in visible(html)


def test_the_client_of_an_inline_run_is_busy_with_the_stages(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "inline", executor="inline")
    writer.cell("async_output", 1, requests=4)
    writer.cells[0]["client_busy_share"] = 0.99
    assert warnings(load(writer.write())) == []
