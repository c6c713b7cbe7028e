"""Figures of the notebooks on batching, graphs, chunks and gaps, from rows whose answers can be worked out by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from omni_lab.views import cost, graphs, largest, overlap, theme, verdicts
from omni_lab.workbench.page import follow_theme

CELL = {"configuration": "async_chunk", "concurrency": 1, "repeat": 0}
SEND = 1_000_000_000


def steps(*rows: tuple[str, float, float], **columns: object) -> pd.DataFrame:
    """Steps of a stage from ms to ms after SEND."""
    common = {**CELL, "replica": 0, "batch": 1, "tokens": 1, "kind": "decode", **columns}
    return pd.DataFrame(
        {**common, "stage": stage, "start_ns": SEND + round(start * 1e6), "end_ns": SEND + round(end * 1e6)}
        for stage, start, end in rows
    )


def took(ms: list[float], batch: int, **columns: object) -> pd.DataFrame:
    return pd.concat([steps(("talker", 0, one), batch=batch, **columns) for one in ms])


def chunks(*rows: tuple[str, float, float]) -> pd.DataFrame:
    """Hand-offs: edge, produced and received in ms after SEND."""
    return pd.DataFrame(
        {**CELL, "request": "a", "edge": edge, "index": 0, "frames": 1, "bytes": 1,
         "produced_ns": SEND + made * 1e6, "sent_ns": SEND + made * 1e6, "received_ns": SEND + got * 1e6}
        for edge, made, got in rows
    )  # fmt: skip


def request(**columns: object) -> dict[str, object]:
    row = {**CELL, "id": "a", "send_ns": SEND, "e2el_ms": 20.0, "audio_ttfp_ms": 12.0}
    return {**row, "audio_times_ms": [12.0, 20.0], "audio_chunk_samples": [10, 10], **columns}


# What a step costs


def test_the_cost_of_a_step_by_its_batch() -> None:
    rows = pd.concat(
        [
            took([1, 2, 6], batch=1),
            took([3, 6], batch=3),
            took([8], batch=4),
            took([9, 9], batch=8),
            took([50, 50, 50], batch=1, kind="prefill"),
        ]
    )
    whole = cost.step_times(rows)
    assert whole["batch"].tolist() == pytest.approx([1, 10 / 3])
    assert whole["median_ms"].tolist() == [2, 6]
    assert whole["low_ms"].tolist() == [1.5, 4.5]
    assert whole["steps"].tolist() == [3, 3]
    assert cost.step_times(rows, each=True)["median_ms"].tolist() == [2, 2]


def test_the_cost_has_a_panel_for_each_stage_and_a_line_for_each_configuration() -> None:
    rows = took([1, 2, 3], batch=1)
    rows = pd.concat([rows, rows.assign(configuration="eager"), rows.assign(stage="code2wav", kind="vocode")])
    figure = cost.by_batch(rows)
    assert {annotation.text for annotation in figure.layout.annotations} == {"talker", "code2wav"}
    assert sorted(trace.name for trace in figure.data) == ["async_chunk", "async_chunk", "eager"]
    assert sum(trace.showlegend for trace in figure.data) == 2
    assert cost.by_batch(rows.iloc[:0]).layout.annotations[0].text == "not measured"


# Replays


def test_replays_and_eager_steps_are_shares_of_their_sum() -> None:
    stages = pd.DataFrame(
        [
            {"configuration": "full", "concurrency": 1, "stage": "talker", "graph_replays": 30.0, "eager_steps": 10.0},
            {"configuration": "full", "concurrency": 16, "stage": "talker", "graph_replays": 60.0, "eager_steps": None},
            {"configuration": "eager", "concurrency": 1, "stage": "talker", "graph_replays": None, "eager_steps": 7.0},
        ]
    )
    replayed, eager = graphs.replays(stages).data
    assert dict(zip(replayed.y, replayed.x, strict=True)) == {"eager": 0.0, "full": 0.9}
    assert dict(zip(eager.y, eager.customdata, strict=True)) == {"eager": 7, "full": 10}
    nothing = graphs.replays(stages.drop(columns=["graph_replays", "eager_steps"]))
    assert nothing.layout.annotations[0].text == "not measured"


# The largest gap


def gap(stage: str, concurrency: int, **causes: float) -> dict[str, object]:
    named = {f"gap_{cause}_us": causes.get(cause, 0.0) for cause in ("schedule", "payload", "send", "other", "input")}
    return {"configuration": "async_chunk", "concurrency": concurrency, "stage": stage, "step_ms": 10.0, **named}


def test_the_largest_gap_comes_first_with_its_cause() -> None:
    stages = pd.DataFrame(
        [
            gap("talker", 1, schedule=30, payload=10),
            gap("thinker", 64, payload=3000, send=900, schedule=100, input=90_000),
            {**gap("code2wav", 64), "gap_send_us": None},
        ]
    )
    found = largest.largest(stages)
    assert found["stage"].tolist() == ["thinker", "talker"]
    assert found["gap_us"].tolist() == [4000, 40]
    assert found["of_step"].tolist() == pytest.approx([0.4, 0.004])
    assert found["cause"].tolist() == ["build payloads", "schedule"]
    assert found["cause_share"].tolist() == [0.75, 0.75]
    words = largest.sentence(found.iloc[0])
    assert words.startswith("thinker in `async_chunk`, 64 in flight: 4.00 ms between two steps")
    assert "40% of a step" in words and "**build payloads** (75%) and **send** (22%)" in words
    assert largest.largest(stages.iloc[2:]).empty


# Overlap


def one_request() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The thinker works from 0 to 8 ms, the talker from 6 to 14, code2wav from 10 to 12 and from 14 to 19."""
    taken = steps(
        ("thinker", 0, 4), ("thinker", 4, 8), ("talker", 6, 10), ("talker", 10, 14), ("code2wav", 10, 12),
        ("code2wav", 14, 19), ("thinker", 16, 18), ("talker", 30, 40),
    )  # fmt: skip
    handed = chunks(
        ("client->thinker", 0, 0), ("thinker->talker", 4, 5), ("thinker->client", 8, 9), ("talker->code2wav", 10, 10),
        ("talker->code2wav", 14, 14), ("code2wav->client", 12, 12), ("code2wav->client", 19, 20),
    )  # fmt: skip
    return pd.DataFrame([request()]), taken, handed


def test_what_stages_do_at_the_same_time() -> None:
    requests, taken, handed = one_request()
    found = overlap.shares(requests, taken, handed).iloc[0]
    assert found["busy_ms"] == pytest.approx(8 + 8 + 7)
    assert found["together_ms"] == pytest.approx((8 - 6) + (12 - 10))
    assert (found["ttfp_ms"], found["e2el_ms"]) == (12, 20)


def test_the_overlap_shows_the_steps_of_the_request_alone() -> None:
    requests, taken, handed = one_request()
    after = [request(configuration="whole", audio_times_ms=[20.0], audio_chunk_samples=[20], audio_ttfp_ms=20.0)]
    both = pd.concat([requests, pd.DataFrame(after)])
    tables = (pd.concat([table, table.assign(configuration="whole")]) for table in (taken, handed))
    figure = overlap.overlap(both, *tables)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) == 2 * 6  # without the steps that were taken for others
    assert list(figure.layout.yaxis.ticktext) == ["thinker", "talker", "code2wav", "client"] * 2
    stars = [trace for trace in figure.data if trace.name == "first audio"]
    assert [trace.x[0] for trace in stars] == [12, 20]
    assert stars[1].y[0] > stars[0].y[0]
    assert overlap.overlap(both, taken.iloc[:0], handed).layout.annotations[-1].text == "not measured"


def test_the_typical_request_is_the_median_of_those_alone() -> None:
    rows = pd.DataFrame(
        [request(id=str(ms), e2el_ms=ms) for ms in (30.0, 10.0, 20.0, None)] + [request(id="busy", concurrency=16)]
    )
    assert overlap.typical(rows)["id"].tolist() == ["20.0"]


# Verdicts


def test_a_comparison_in_words_counts_noise_and_names_the_rest() -> None:
    common = {"configuration": "after", "stage": None, "low": 0.5, "high": 0.9, "ratio": 0.7}
    rows = pd.DataFrame(
        [
            {**common, "concurrency": 1, "figure": "mean_e2el_ms", "verdict": "within noise", "better": None},
            {**common, "concurrency": 1, "figure": "mean_audio_ttfp_ms", "verdict": "lower", "better": True},
            {**common, "concurrency": 16, "figure": "request_throughput_per_s", "verdict": "lower", "better": False},
            {**common, "concurrency": 16, "figure": "mean_audio_ttfp_ms", "verdict": "lower", "better": True},
            {**common, "concurrency": 64, "figure": "mean_e2el_ms", "verdict": "too few repeats", "better": None},
            {**common, "concurrency": 64, "figure": "mean_ttft_ms", "verdict": "no ratio", "ratio": None},
        ]
    ).astype({"better": "boolean"})
    noise, better, worse, rest = verdicts.in_words(rows).replace("**", "").split(". ")
    assert noise == "1 of 5 ratios are within noise"
    where = "x0.7 (0.5 to 0.9) at 1 in flight, x0.7 (0.5 to 0.9) at 16 in flight"
    assert better == f"Better: Time to first packet (TTFP) in `after`, {where}"
    assert worse == "Worse: Request throughput in `after`, x0.7 (0.5 to 0.9) at 16 in flight"
    assert rest == "No word about 1 of them: too few repeats."
    assert verdicts.in_words(rows.iloc[5:]) == "Nothing was compared."


# The page


def test_figures_follow_the_page_in_the_colours_of_the_dark_template() -> None:
    style = follow_theme().data
    dark = theme.template(dark=True).layout
    for color in (dark.font.color, dark.xaxis.gridcolor, dark.xaxis.linecolor):
        assert color in style
    assert style.count("{") == style.count("}")
