"""Figures from rows whose answers can be worked out by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from omni_lab.metrics.aggregate import add_counts, cell_figures, repeat_figures, stage_figures
from omni_lab.metrics.continuity import underrun_s
from omni_lab.metrics.definitions import DISTRIBUTIONS
from omni_lab.metrics.phases import CAUSES, PHASES
from omni_lab.metrics.records import RequestRow, StepRow
from omni_lab.metrics.relative import compare
from omni_lab.metrics.request import request_figures
from omni_lab.metrics.table import cell_table, ratio_table, start_lines

RATE = 24_000
MS = 1_000_000


def answer(index: int = 0, sent: float = 0, end: float = 1000, **fields) -> RequestRow:
    """A request with text at 100, 120 and 160 ms and two chunks of 0.32 and 2 s at 200 and 900 ms after its send."""
    row = RequestRow(f"r{index}", index, due_ns=int(sent * MS), sent_ns=int(sent * MS), end_ns=int(end * MS))
    row.text_ns = [int((sent + ms) * MS) for ms in (100, 120, 160)]
    row.text_tokens = [1, 1, 2]
    row.audio_ns = [int((sent + ms) * MS) for ms in (200, 900)]
    row.audio_samples = [4 * 1920, 25 * 1920]
    row.audio_frames = [4, 25]
    row.reasons = {"text": "stop", "audio": "stop"}
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def step(start: float, end: float, **fields) -> StepRow:
    """A step from start to end, in µs; phases of the time before it too."""
    values = {"stage": "talker", "replica": 0, "step": 0, "batch": 1, "tokens": 1, "kind": "decode"}
    values |= {f"{phase}_ns": int(fields.pop(phase) * 1000) for phase in PHASES if phase in fields} | fields
    return StepRow(start_ns=int(start * 1000), end_ns=int(end * 1000), **values)


def test_request_figures_follow_the_definitions() -> None:
    figures = request_figures(answer(sent=50, end=1050), RATE)
    assert figures.ttft_ms == pytest.approx(100)
    assert figures.itl_ms == pytest.approx([20, 20, 20])
    assert figures.tpot_ms == pytest.approx(20)
    assert figures.audio_ttfp_ms == pytest.approx(200)
    assert figures.audio_duration_s == pytest.approx(29 * 0.08)
    assert figures.audio_rtf == pytest.approx(0.9 / 2.32)
    assert figures.e2el_ms == pytest.approx(1000)
    assert figures.audio_underrun_s == pytest.approx(0.7 - 0.32)
    assert (figures.text_tokens, figures.codec_frames) == (4, 29)


def test_tokens_of_the_first_event_cost_nothing_and_empty_events_do_not_count() -> None:
    row = answer(text_ns=[5 * MS, 10 * MS, 30 * MS], text_tokens=[0, 3, 1])
    figures = request_figures(row, RATE)
    assert figures.ttft_ms == pytest.approx(10)
    assert figures.itl_ms == pytest.approx([0, 0, 20])


def test_first_packet_is_the_first_with_samples_in_it() -> None:
    row = answer(audio_ns=[100 * MS, 300 * MS], audio_samples=[0, 1920], audio_frames=[0, 1])
    assert request_figures(row, RATE).audio_ttfp_ms == pytest.approx(300)


def test_what_did_not_happen_is_none_not_zero() -> None:
    silent = request_figures(answer(audio_ns=[], audio_samples=[], audio_frames=[]), RATE)
    assert silent.audio_ttfp_ms is silent.audio_rtf is silent.audio_duration_s is silent.audio_underrun_s is None
    one_token = request_figures(answer(text_ns=[MS], text_tokens=[1]), RATE)
    assert one_token.ttft_ms == pytest.approx(1) and one_token.tpot_ms is None
    failed = request_figures(answer(error="thinker: broken"), RATE)
    assert failed.e2el_ms is None and failed.ttft_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("arrivals", "audio", "expected"),
    [
        ([], [], 0),
        ([3.0], [0.1], 0),
        ([0, 0.3], [0.32, 2], 0),
        ([0, 0.5], [0.32, 2], 0.18),
        ([0, 1.0, 1.1], [0.32, 0.1, 2], 0.68),
        ([0, 0.5, 1.0, 5.0], [0.4, 2, 2, 1], 0.6),
    ],
)
def test_underrun(arrivals: list[float], audio: list[float], expected: float) -> None:
    assert underrun_s(arrivals, audio) == pytest.approx(expected)


def test_underrun_is_the_start_delay_that_would_have_been_enough() -> None:
    """A player that starts `underrun` later never runs dry; one that starts a little earlier does."""
    draw = random.Random(1)
    for _ in range(50):
        arrivals = np.cumsum([draw.expovariate(5) for _ in range(12)])
        audio = np.array([draw.uniform(0.05, 0.4) for _ in range(12)])
        needed = underrun_s(list(arrivals), list(audio))
        consumed = arrivals[1:] - arrivals[0]
        received = np.cumsum(audio)[:-1]
        assert (consumed - needed <= received + 1e-9).all()
        if needed:
            assert not (consumed - needed + 1e-6 <= received).all()


def test_throughput_counts_completed_requests_over_the_whole_duration() -> None:
    rows = [answer(0, 0, 1000), answer(1, 0, 2000), answer(2, 1000, 4000, error="broken")]
    figures = repeat_figures(rows, 2, RATE, cpu_s=1.0)
    assert (figures["completed"], figures["failed"], figures["duration"]) == (2, 1, 4.0)
    assert figures["request_throughput"] == pytest.approx(0.5)
    assert figures["output_throughput"] == pytest.approx(2)
    assert figures["audio_throughput"] == pytest.approx(2 * 2.32 / 4)
    assert figures["mean_e2el_ms"] == pytest.approx(1500)
    assert figures["client_busy_share"] == pytest.approx(0.25)
    assert figures["audio_continuity_ok_rate"] == 0


def test_a_cell_without_a_completed_request_has_no_latencies() -> None:
    figures = repeat_figures([answer(error="broken")], 1, RATE, 0.0)
    assert figures["completed"] == 0 and figures["request_throughput"] == 0
    for name in DISTRIBUTIONS:
        assert figures[f"mean_{name}"] is figures[f"median_{name}"] is figures[f"p99_{name}"] is None
    assert figures["audio_continuity_ok_rate"] is figures["littles_law_ratio"] is None


def test_requests_in_flight_obey_littles_law() -> None:
    draw = random.Random(2)
    rows = []
    for index in range(40):
        sent = draw.uniform(0, 5000)
        rows.append(answer(index, sent, sent + draw.uniform(200, 900)))
    figures = repeat_figures(rows, None, RATE, 0.0)
    expected = figures["request_throughput"] * figures["mean_e2el_ms"] / 1000
    assert figures["mean_requests_in_flight"] == pytest.approx(expected)
    assert figures["littles_law_ratio"] == pytest.approx(1)
    failed = repeat_figures([*rows, answer(40, 0, 5000, error="broken")], None, RATE, 0.0)
    assert failed["littles_law_ratio"] < 0.95


def test_steady_throughput_leaves_out_first_wave_and_tail() -> None:
    """Two slots, one request a second in each, then one of 90 s: the run is slow, its steady part is not."""
    rows = [answer(index, 1000 * (index // 2), 1000 * (index // 2 + 1)) for index in range(20)]
    rows.append(answer(20, 10_000, 100_000))
    figures = repeat_figures(rows, 2, RATE, 0.0)
    assert figures["request_throughput"] == pytest.approx(0.21)
    assert figures["steady_request_throughput"] == pytest.approx(2)
    assert figures["first_wave"]["completed"] == 2
    assert figures["first_wave"]["mean_e2el_ms"] == pytest.approx(1000)
    assert repeat_figures(rows[:2], 2, RATE, 0.0)["steady_request_throughput"] is None
    assert repeat_figures(rows, None, RATE, 0.0)["steady_request_throughput"] is None


def test_speech_cut_at_the_limit_is_counted_unless_its_length_was_fixed() -> None:
    rows = [answer(0), answer(1, reasons={"text": "stop", "audio": "length"})]
    assert repeat_figures(rows, 1, RATE, 0.0)["hit_max_frames"] == 1
    assert repeat_figures(rows, 1, RATE, 0.0, fixed_frames=True)["hit_max_frames"] is None


def test_waiting_is_no_gap_of_the_loop() -> None:
    steps = [
        step(0, 100, schedule=5, other=70),
        step(110, 200, schedule=4, payload=6, sample=20),
        step(1200, 1300, idle=500, input=470, slot=10, schedule=20),
        step(1330, 1400, schedule=10, send=15, other=5),
        step(0, 700, stage="thinker", schedule=3),
    ]
    stages = stage_figures(steps, duration_s=2e-3, replicas={"talker": 1})
    talker = stages["talker"]
    assert talker["steps"] == 4
    assert talker["gap_us_median"] == pytest.approx(20)
    assert talker["gap_us_p99"] == pytest.approx(np.percentile([10, 20, 30], 99))
    assert talker["step_ms"] == pytest.approx(0.36 / 4)
    assert talker["busy_ratio"] == pytest.approx(0.42e-3 / 2e-3)
    assert talker["tokens_per_s"] == pytest.approx(4 / 0.42e-3)
    assert talker["step_sample_us"] == pytest.approx(5)
    causes = {cause: talker[f"gap_{cause}_us"] for cause in CAUSES}
    expected = {"input": 470, "slot": 10, "schedule": 34, "payload": 6, "send": 15, "other": 5}
    assert causes == pytest.approx({cause: total / 3 for cause, total in expected.items()})
    assert sum(causes.values()) == pytest.approx((10 + (1000 - 500) + 30) / 3)
    assert stages["thinker"]["gap_us_median"] is stages["thinker"]["gap_input_us"] is None


def test_a_step_inside_another_one_has_no_gap() -> None:
    steps = [step(0, 100, forward=100), step(500, 600, forward=100)]
    thinker = stage_figures(steps, 1e-3, {})["talker"]
    assert thinker["gap_us_median"] is None and thinker["busy_ratio"] == pytest.approx(0.2)


def test_what_workers_counted_between_two_readings_is_their_stages() -> None:
    stages = stage_figures([step(0, 100), step(200, 300, replica=1)], 1e-3, {"talker": 2})
    before = {"talker_r0": {"graph_replays": 5, "beside_ns": 100}}
    after = {"talker_r0": {"graph_replays": 9, "beside_ns": 4100}, "talker_r1": {"graph_replays": 2, "beside_ns": 2000}}
    add_counts(stages, before, after)
    assert stages["talker"]["graph_replays"] == 6 and stages["talker"]["beside_us"] == pytest.approx(3)


def test_gaps_are_between_steps_of_one_replica() -> None:
    steps = [
        step(0, 100),
        step(50, 150, replica=1),
        step(140, 200, schedule=40),
        step(160, 250, replica=1, schedule=10, batch=3, tokens=3),
    ]
    talker = stage_figures(steps, 1e-3, {"talker": 2})["talker"]
    assert talker["gap_us_median"] == pytest.approx(25)
    assert talker["busy_ratio"] == pytest.approx(0.2)
    assert talker["mean_batch"] == pytest.approx(1.5)


def test_cell_is_the_mean_of_its_repeats_with_deviation() -> None:
    repeats = [
        {"completed": 4, "mean_ttft_ms": 10.0, "mean_audio_rtf": None, "stages": {"talker": {"step_ms": 1.0}}},
        {"completed": 4, "mean_ttft_ms": 14.0, "mean_audio_rtf": None, "stages": {"talker": {"step_ms": 3.0}}},
    ]
    cell = cell_figures(repeats)
    assert (cell["completed"], cell["completed_std"]) == (4, 0)
    assert (cell["mean_ttft_ms"], cell["mean_ttft_ms_std"]) == (12, pytest.approx(math.sqrt(8)))
    assert cell["mean_audio_rtf"] is cell["mean_audio_rtf_std"] is None
    assert cell["stages"]["talker"] == {"step_ms": 2, "step_ms_std": pytest.approx(math.sqrt(2))}
    assert cell_figures(repeats[:1])["mean_ttft_ms_std"] is None


def test_the_first_start_is_told_apart_from_later_ones() -> None:
    cold = {"ready_s": 62.04, "compile_s": 60.0, "compiled_graphs": 7}
    warm = [{"ready_s": seconds, "compile_s": 0.0, "compiled_graphs": 0} for seconds in (2.0, 3.0)]
    known = {"full": {"starts": [cold, *warm]}, "served": {"starts": [{"ready_s": 5.0}]}, "old": {}}
    assert list(start_lines(known)) == [
        "full: ready after 62.0 s, 60.0 s of it for 7 graphs that had to be compiled, once; later 2.5 s on average",
        "served: ready after 5.0 s",
    ]


def test_table_is_aligned_and_compares_with_the_first_configuration() -> None:
    cells = [
        {"configuration": "a", "concurrency": 1, "request_throughput": 2.0, "request_throughput_std": 0.1},
        {"configuration": "longer", "concurrency": 1, "request_throughput": 5.0, "mean_ttft_ms": 12.3456},
        {"configuration": "longer", "concurrency": 16, "request_throughput": 7.0},
    ]
    for cell in cells:
        cell["runs"] = [{"repeat": 0, "request_throughput": cell["request_throughput"]}]
    compare(cells, "a")
    lines = cell_table(cells).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "2 ±0.1" in lines[2] and "12" in lines[3].split() and lines[4].split()[3] == "-"
    ratios = ratio_table(cells).splitlines()
    assert len(ratios) == 6
    assert ratios[2].split()[:3] == ["longer", "1", "x2.5?"]
    assert ratios[3].split()[:3] == ["longer", "16", "-"]


def test_counts_are_those_of_the_cell_and_all_replicas() -> None:
    stages = {"talker": {"steps": 9}, "code2wav": {"steps": 4}}
    before = {"talker_r0": {"graph_replays": 10, "eager_steps": 1}, "talker_r1": {"graph_replays": 0, "eager_steps": 0}}
    after = {
        "talker_r0": {"graph_replays": 15, "eager_steps": 1, "late_payloads": 3},
        "talker_r1": {"graph_replays": 4, "eager_steps": 2},
        "code2wav_r0": {"late_payloads": 0},
        "thinker_r0": {"eager_steps": 5},
    }
    add_counts(stages, before, after)
    assert stages == {"talker": {"steps": 9, "graph_replays": 9, "eager_steps": 2}, "code2wav": {"steps": 4}}
