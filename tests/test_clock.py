"""The step clock: phases that add up, rows that are kept, and what a real worker tells it."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from omni_lab.core import Request, Sampling
from omni_lab.engine.clock import COLUMNS, FORWARD, INPUT, OTHER, PAYLOAD, PREPARE, SCHEDULE, StepClock
from omni_lab.metrics.phases import CAUSES, HOST, PHASES, STEP, WAITS
from omni_lab.metrics.records import StepRow
from tests.pipelines import answers, experiment

INLINE = ("executor=inline", "connector=in_process")


def rows(clock: StepClock) -> list[dict]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in clock.take()[0]]


def test_phases_add_up_to_the_time_that_has_passed() -> None:
    clock = StepClock()
    began = clock.since
    for phase in (SCHEDULE, PREPARE, FORWARD, PAYLOAD):
        clock.enter(phase)
        time.sleep(0.002)
    clock.record("talker", 3, 2, "decode")
    (row,) = rows(clock)
    assert sum(row[f"{phase}_ns"] for phase in PHASES) == row["end_ns"] - began
    assert row["end_ns"] - row["start_ns"] == row["prepare_ns"] + row["forward_ns"]
    assert row["payload_ns"] == 0 and row["forward_ns"] >= 2_000_000
    clock.enter(OTHER)
    clock.record("talker", 1, 1, "decode")
    assert rows(clock)[0]["payload_ns"] >= 2_000_000


def test_a_step_that_fails_ends_where_it_failed() -> None:
    clock = StepClock()
    clock.enter(FORWARD)
    time.sleep(0.002)
    clock.record("talker", 1, 0, "decode")
    (row,) = rows(clock)
    assert row["end_ns"] - row["start_ns"] == row["forward_ns"] >= 2_000_000


def test_a_step_inside_a_running_one_leaves_its_phases_alone() -> None:
    clock = StepClock()
    clock.enter(FORWARD)
    began = clock.since
    clock.add("thinker", began, began + 500, 1, 7, "generate")
    clock.enter(PAYLOAD)
    clock.record("transformers", 1, 7, "generate")
    inner, outer = rows(clock)
    assert (inner["name"], inner["step"], inner["end_ns"] - inner["start_ns"]) == ("thinker", 0, 500)
    assert sum(inner[f"{cause}_ns"] for cause in CAUSES) == 0
    assert outer["start_ns"] == began and outer["forward_ns"] == outer["end_ns"] - began


def test_a_full_ring_keeps_the_newest_steps_and_counts_the_others() -> None:
    clock = StepClock(capacity=4)
    for step in range(10):
        clock.add("talker", step, step + 1, 1, 1, "decode")
    taken, lost = clock.take()
    assert [row[1] for row in taken] == [6, 7, 8, 9] and lost == 6
    clock.add("talker", 10, 11, 1, 1, "decode")
    assert [row[1] for row in clock.take()[0]] == [10]


def test_looking_for_work_in_vain_is_waiting() -> None:
    clock = StepClock()
    for _ in range(3):
        clock.enter(SCHEDULE)
        time.sleep(0.002)
        clock.rename(INPUT)
        time.sleep(0.001)
    clock.enter(SCHEDULE)
    clock.enter(FORWARD)
    clock.record("talker", 1, 1, "decode")
    (row,) = rows(clock)
    assert row["input_ns"] >= 9_000_000 and row["idle_ns"] == 0 < row["schedule_ns"]


@pytest.fixture(scope="module")
def steps(nano: Path) -> list[StepRow]:
    """The steps of four requests in a real pipeline, in processes, whose stages wait for each other."""
    sampling = {"thinker": Sampling(min_tokens=12, max_tokens=12), "talker": Sampling(min_tokens=20, max_tokens=20)}
    prompt = [{"role": "user", "content": "Tell me a story."}]
    asked = [Request(f"r{index}", prompt, sampling=sampling) for index in range(4)]
    return answers(experiment(nano, "optimizations.async_output=false"), asked, [2])[1].steps


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_every_moment_of_a_worker_has_one_cause(steps: list[StepRow], stage: str) -> None:
    own = [row for row in steps if row.stage == stage]
    assert len(own) > 2
    for row in own:
        assert row.end_ns - row.start_ns == sum(getattr(row, f"{phase}_ns") for phase in STEP)
    for before, row in pairwise(own):
        between = sum(getattr(row, f"{phase}_ns") for phase in (*WAITS, *HOST))
        assert before.end_ns + between == row.start_ns
    assert all(row.schedule_ns and row.forward_ns for row in own)
    assert any(row.send_ns for row in own) and any(row.payload_ns for row in own)


def test_a_stage_that_waits_for_another_says_so(steps: list[StepRow]) -> None:
    """Code2Wav has nothing to do until the Talker's first chunk is there: it waits for input, with a request open."""
    first = next(row for row in steps if row.stage == "code2wav")
    assert first.input_ns > first.end_ns - first.start_ns > 0


def test_inline_stages_wait_for_the_thread(nano: Path) -> None:
    prompt = [{"role": "user", "content": "Hello."}]
    sampling = {"thinker": Sampling(max_tokens=8), "talker": Sampling(max_tokens=12)}
    measured = answers(experiment(nano, *INLINE), [Request("r", prompt, sampling=sampling)])[1]
    talker = [row for row in measured.steps if row.stage == "talker"]
    assert sum(row.slot_ns for row in talker) > 0
