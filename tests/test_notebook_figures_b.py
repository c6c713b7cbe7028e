"""The figures of the notebooks about pieces, layers, equality, playback and traces, on runs of a known shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import soundfile

from omni_lab.frames import Run, load
from omni_lab.metrics.continuity import underrun_s
from omni_lab.views import equality, layers, pieces, rechunk, theme, traces

REPEATS = 3
SPREAD = (0.98, 1.0, 1.03)
"""How the machine disturbed each repeat: alike in all configurations, so that pairs do not see it."""


def cell(configuration: str, concurrency: int, **figures: float) -> dict:
    runs = [
        {"repeat": repeat, **{name: value * SPREAD[repeat] for name, value in figures.items()}}
        for repeat in range(REPEATS)
    ]
    return {"configuration": configuration, "concurrency": concurrency, **figures, "runs": runs}


def written(path: Path, cells: list[dict], requests: list[dict] = (), **tables: pd.DataFrame) -> Run:
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps({"schema_version": 1, "experiment": {}, "cells": cells}))
    (path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests))
    for name, table in tables.items():
        table.to_parquet(path / f"{name}.parquet")
    return load(path)


# Pieces


@pytest.fixture
def hot(tmp_path: Path) -> Run:
    """All off 1000 ms, all on 400; one piece saves 450, the other 200, so they overlap by 50."""
    latencies = {"all_off": 1000.0, "all_on": 400.0, "code_predictor": 550.0, "resident_state": 800.0}
    return written(tmp_path / "hot", [cell(name, 1, mean_e2el_ms=value) for name, value in latencies.items()])


def test_what_the_pieces_save_and_their_shares(hot: Run) -> None:
    found = pieces.saved(hot, "mean_e2el_ms", "all_off", "all_on").set_index("configuration")
    mean = np.mean(SPREAD)
    assert found["saved"].to_dict() == pytest.approx(
        {"all_on": 600 * mean, "code_predictor": 450 * mean, "resident_state": 200 * mean, pieces.SUM: 650 * mean}
    )
    assert found.loc["code_predictor", "share"] == pytest.approx(0.75)
    assert (found["low"] < found["saved"]).all() and (found["saved"] < found["high"]).all()


def test_pieces_are_drawn_with_the_whole_above_and_the_largest_first(hot: Run) -> None:
    figure = pieces.figure(pieces.saved(hot, "mean_e2el_ms", "all_off", "all_on"), "mean_e2el_ms", "all_on")
    assert list(figure.data[0].y) == ["all on", "code predictor", "resident state", pieces.SUM]
    assert "75%" in figure.data[1].text[1] and "ms" in figure.layout.title.text


def test_one_repeat_has_shares_without_an_interval(tmp_path: Path) -> None:
    cells = [cell("all_off", 1, mean_e2el_ms=10.0), cell("all_on", 1, mean_e2el_ms=5.0)]
    for one in cells:
        one["runs"] = one["runs"][1:2]
    found = pieces.saved(written(tmp_path / "one", cells), "mean_e2el_ms", "all_off", "all_on")
    assert found["saved"].iloc[0] == pytest.approx(5.0) and found["low"].isna().all()
    assert isinstance(pieces.figure(found, "mean_e2el_ms", "all_on"), go.Figure)


def test_a_run_without_the_whole_says_so(hot: Run) -> None:
    with pytest.raises(ValueError, match="expected the configuration everything"):
        pieces.saved(hot, "mean_e2el_ms", "all_off", "everything")


# Layers


@pytest.fixture
def climbed(tmp_path: Path) -> tuple[Run, Run]:
    rungs = {"batch": (800.0, 2.0), "cuda_graph": (400.0, 4.0), "async_chunk": (100.0, 4.0)}
    ladder = [cell(name, 16, mean_audio_ttfp_ms=a, request_throughput=b) for name, (a, b) in rungs.items()]
    full = {"full": (50.0, 8.0), "no_graphs": (75.0, 4.0), "no_async_chunk": (300.0, 8.0), "no_ramp": (50.0, 8.0)}
    without = [cell(name, 16, mean_audio_ttfp_ms=a, request_throughput=b) for name, (a, b) in full.items()]
    return written(tmp_path / "ladder", ladder), written(tmp_path / "without", without)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            "mean_audio_ttfp_ms",
            {("cuda_graph", layers.ADDED): 2, ("async_chunk", layers.ADDED): 4, ("cuda_graph", layers.WITHOUT): 1.5,
             ("async_chunk", layers.WITHOUT): 6, ("ramp", layers.WITHOUT): 1},
        ),
        (
            "request_throughput_per_s",
            {("cuda_graph", layers.ADDED): 2, ("async_chunk", layers.ADDED): 1, ("cuda_graph", layers.WITHOUT): 2,
             ("async_chunk", layers.WITHOUT): 1, ("ramp", layers.WITHOUT): 1},
        ),
    ],
)  # fmt: skip
def test_a_layer_is_worth_what_it_adds_and_what_is_lost_without_it(
    climbed: tuple[Run, Run], metric: str, expected: dict
) -> None:
    found = layers.worth(*climbed, metric, 16)
    ours = found[found["how"] != layers.THEIRS]
    assert {(row["layer"], row["how"]): row["factor"] for _, row in ours.iterrows()} == pytest.approx(expected)
    assert found["layer"].cat.categories[:3].tolist() == ["batch", "cuda_graph", "async_chunk"]


def test_layers_are_set_beside_the_published_ones(climbed: tuple[Run, Run]) -> None:
    found = layers.worth(*climbed, "mean_audio_ttfp_ms", 16)
    theirs = found[found["how"] == layers.THEIRS].set_index("layer")["factor"]
    assert theirs["async_chunk"] == pytest.approx(1624 / 315)
    figure = layers.figure(found, "mean_audio_ttfp_ms", 16)
    assert [trace.name for trace in figure.data] == [layers.ADDED, layers.WITHOUT, layers.THEIRS]
    assert figure.layout.yaxis.ticktext == ("cuda graph", "async chunk", "ramp", "async output", "stage replicas")


def test_a_load_that_was_not_measured_gives_no_layers(climbed: tuple[Run, Run]) -> None:
    found = layers.worth(*climbed, "mean_audio_ttfp_ms", 3)
    assert found.empty and "not measured" in str(layers.figure(found, "mean_audio_ttfp_ms", 3).layout)


# Equality


def spoken(path: Path, changes: dict[str, dict]) -> Run:
    """One sentence from `base` and from others, whose rows are changed; `shift` moves one sample by so many steps."""
    rows = []
    (path / "audio").mkdir(parents=True)
    for name, change in {"base": {}, **changes}.items():
        change = dict(change)
        samples = np.full(1365, 1000, np.int16)
        samples[7] += change.pop("shift", 0)
        soundfile.write(path / "audio" / f"{name}.flac", samples, 24_000, subtype="PCM_16")
        row = {"id": name, "configuration": name, "concurrency": 4, "repeat": 0, "prompt": "rep_1"}
        row |= {"target_text": "Yes.", "text_token_ids": [5, 6], "codes": [[1, 2], [3, 4]], "codec_frames": 1}
        row |= {"audio_duration_s": 1365 / 24_000, "audio_file": f"audio/{name}.flac"}
        rows.append(row | change)
    return written(path, [cell(row["configuration"], 4) for row in rows], rows)


def test_each_answer_is_the_same_or_it_says_what_differs(tmp_path: Path) -> None:
    changes = {
        "rounded": {"shift": 1},
        "off": {"shift": -40},
        "codes": {"codes": [[1, 2], [3, 5]]},
        "tokens": {"text_token_ids": [5]},
        "bare": {"text_token_ids": None, "codes": None, "audio_file": None},
    }
    run = spoken(tmp_path / "run", changes)
    found = equality.equality(run).set_index("configuration")
    assert found["verdict"].to_dict() == {
        "rounded": equality.SAME,
        "off": equality.APART,
        "codes": equality.OTHER,
        "tokens": equality.OTHER,
        "bare": equality.UNKNOWN,
    }
    assert (
        found.loc["rounded", "steps"] == 1 and found.loc["off", "steps"] == 40 and np.isnan(found.loc["bare", "steps"])
    )
    assert found.loc["codes", "codes_equal"] is False and found.loc["bare", "codes_equal"] is None
    counted = equality.summary(equality.equality(run)).set_index("configuration")
    assert counted["same_codes"].to_dict() == {"rounded": 1, "off": 1, "codes": 0, "tokens": 1, "bare": 0}
    figure = equality.figure(equality.equality(run), "base")
    assert {trace.name for trace in figure.data} == {
        equality.SAME, equality.APART, equality.OTHER, equality.UNKNOWN
    }  # fmt: skip


# Other chunks

FRAME_NS, SEND_NS = 20_000_000, 5_000_000_000


@pytest.fixture
def handed(tmp_path: Path) -> Run:
    """Two answers, alone, of 40 frames, one every 20 ms, in four chunks; each takes 5 ms and 1 ms a frame."""
    requests, steps, chunks = [], [], []
    for number in range(2):
        send = SEND_NS + number * 10**10
        key = {"configuration": "ramp", "concurrency": 1, "repeat": 0}
        ready = [send + FRAME_NS * (frame + 3) for frame in range(40)]
        times = {"schedule_ns": 1000, "idle_ns": 0}
        steps += [
            {**key, "stage": "talker", "replica": 0, "step": number * 50 + i, "start_ns": at - 10**7, "end_ns": at,
             "batch": 1, "tokens": 1, "kind": "decode", **times}
            for i, at in enumerate(ready)
        ]  # fmt: skip
        arrivals, done = [], 0
        for index, frames in enumerate((4, 8, 16, 12)):
            done += frames
            made = ready[done - 1]
            came = max([made, *arrivals[-1:]]) + 5_000_000 + frames * 1_000_000
            arrivals.append(came)
            row = {**key, "request": f"r{number}", "index": index, "frames": frames, "bytes": 1, "final": done == 40}
            for edge, produced, received in (("talker->code2wav", made, made), ("code2wav->client", came, came)):
                stamps = {"produced_ns": produced, "sent_ns": produced, "received_ns": received}
                chunks.append({**row, "edge": edge, **stamps})
        row = {**key, "id": f"r{number}", "send_ns": send, "audio_duration_s": (40 * 1920 - 555) / 24_000}
        row |= {"audio_times_ms": [(at - send) / 1e6 for at in arrivals], "audio_chunk_frames": [4, 8, 16, 12]}
        row |= {"audio_chunk_samples": [4 * 1920 - 555, 8 * 1920, 16 * 1920, 12 * 1920], "audio_underrun_s": 0.0}
        requests.append(row | {"audio_ttfp_ms": (arrivals[0] - send) / 1e6, "audio_rtf": 0.3})
    cells = [cell("ramp", 1)]
    return written(tmp_path / "handed", cells, requests, steps=pd.DataFrame(steps), chunks=pd.DataFrame(chunks))


def test_the_recorded_chunks_come_out_as_they_were_recorded(handed: Run) -> None:
    known = rechunk.recorded(handed, "ramp", 1)
    assert (
        len(known.made_ms) == 2 and known.took.fixed_ms == pytest.approx(5) and known.took.frame_ms == pytest.approx(1)
    )
    again = rechunk.what_if(known, {"as it was": (4, 8, 16, 12)})
    for column in ("audio_times_ms", "audio_chunk_samples"):
        assert np.allclose(again[column].tolist(), handed.requests[column].tolist())


def test_other_chunks_change_first_audio_and_silence(handed: Run) -> None:
    known = rechunk.recorded(handed, "ramp", 1)
    rows = rechunk.what_if(known, {"one": (1, 30), "whole": (40,)}).set_index("plan")
    one, whole = rows.loc["one"].iloc[0], rows.loc["whole"].iloc[0]
    assert one["audio_ttfp_ms"] == pytest.approx(3 * 20 + 6) and whole["audio_ttfp_ms"] == pytest.approx(42 * 20 + 45)
    heard_s = (1920 - 555) / 24_000
    assert one["audio_underrun_s"] == pytest.approx((33 * 20 + 35 - 66) / 1e3 - heard_s)
    assert whole["audio_underrun_s"] == 0
    at_s, audio_s = np.array(one["audio_times_ms"]) / 1e3, np.array(one["audio_chunk_samples"]) / 24_000
    assert one["audio_underrun_s"] == pytest.approx(underrun_s(at_s.tolist(), audio_s.tolist()))


def test_frames_are_spaced_evenly_where_the_steps_do_not_tell(handed: Run) -> None:
    bare = replace(handed, steps=handed.steps.iloc[:0])
    ready = rechunk.recorded(bare, "ramp", 1).made_ms[0]
    assert len(ready) == 40 and (np.diff(ready) > 0).all() and ready[11] == pytest.approx(14 * 20)


def test_a_cell_without_handoffs_says_so(handed: Run) -> None:
    with pytest.raises(ValueError, match="hand-offs of talker and code2wav"):
        rechunk.recorded(handed, "ramp", 16)


def test_sizes_jump_or_double() -> None:
    assert rechunk.sizes(4, 25) == (4, 25) and rechunk.sizes(3, 25, ramp=True) == (3, 6, 12, 24, 25)
    assert rechunk.sizes(25, 25, ramp=True) == (25, 25)


def test_the_tradeoff_has_a_point_for_each_plan_and_a_star_for_each_cell(handed: Run) -> None:
    known = rechunk.recorded(handed, "ramp", 1)
    figure = rechunk.tradeoff(rechunk.what_if(known, rechunk.plans(25)), handed.requests)
    points = {trace.name: len(trace.x) for trace in figure.data}
    assert points == {"calculated, one jump": 6, "calculated, doubling": 5, "measured": 1}


def test_two_buffers_on_one_axis_say_when_they_begin(handed: Run) -> None:
    known = rechunk.recorded(handed, "ramp", 1)
    answer = known.requests.iloc[1]
    figure = rechunk.buffers(answer, rechunk.rechunked(answer, known.made_ms[1], known.took, (1, 30)))
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert [line.name.split(",")[0] for line in lines] == [
        "recorded: first audio 129 ms",
        "calculated: first audio 66.0 ms",
    ]
    assert len(figure.layout.shapes) == 1 and figure.layout.shapes[0].fillcolor == theme.VERMILION


# Traces


def test_gaps_of_a_trace_keep_their_longest_when_they_are_thinned() -> None:
    count = 3 * traces.POINTS
    gap_us = np.full(count, 100.0)
    gap_us[count // 2 + 1] = 9000.0
    frame = pd.DataFrame({"worker": "talker", "step": range(count), "kind": "decode", "batch": 1, "gap_us": gap_us})
    figure = traces.gaps(frame.assign(start_ns=np.arange(count) * 1_000_000))
    assert len(figure.data) == 1 and len(figure.data[0].x) <= traces.POINTS + traces.LONGEST
    assert max(figure.data[0].y) == 9000 and "median 100 µs of 6,000" in figure.data[0].name


def test_causes_beyond_the_largest_are_one_bar() -> None:
    names = [f"aten::operator_{number}" for number in range(20)]
    share = np.linspace(0.09, 0.01, 20)
    frame = pd.DataFrame({"worker": "w", "cause": names, "kind": "cpu", "ms": 100 * share, "share": share, "ranges": 3})
    figure = traces.causes(frame)
    assert len(figure.data[0].x) == traces.TOP + 1 and sum(figure.data[0].x) == pytest.approx(share.sum())
    assert figure.layout.yaxis.ticktext[-1] == "12 others"


def test_the_overview_gives_the_reason_where_a_trace_cannot_tell() -> None:
    figures = {"steps": 3, "step_ms_median": 1.0, "gap_us_median": np.nan, "gap_us_p95": np.nan}
    figures |= {"gap_share": np.nan, "idle_share": np.nan}
    one = pd.DataFrame(
        [
            {
                "worker": "a",
                "status": "incomplete",
                "reason": "cut off",
                "found": "markers: 'step' (x); of the host",
                **figures,
            }
        ]
    )
    shown = traces.overview({"mine": one, "yours": one.assign(reason="", status="ok")})
    assert shown["what marks a step"].tolist() == ["cut off", "'step' (x)"] and shown["note"].tolist() == [
        "",
        "of the host",
    ]
    assert shown.index.tolist() == [("mine", "a"), ("yours", "a")]


def test_nothing_to_show_says_so() -> None:
    columns = ["worker", "step", "kind", "batch", "gap_us", "start_ns", "cause", "ms", "share", "ranges"]
    for figure in (traces.gaps(pd.DataFrame(columns=columns)), traces.causes(pd.DataFrame(columns=columns))):
        assert "not measured" in str(figure.layout)
