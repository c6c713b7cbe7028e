"""Schedulers: who takes part in the next step, and what becomes of the cache rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from omni_lab.core import Sampling
from omni_lab.engine.scheduler import ContinuousBatching, LeastServedBatching
from omni_lab.engine.stage import Sequence


@dataclass
class Lengths:
    """A stage of which the schedulers see what sequences need: prompt or chunk lengths, and who has input."""

    tokens: dict[str, int]
    kinds: dict[str, str | None] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(8), ""))

    def next_step(self, sequence: Sequence) -> str | None:
        return self.kinds[sequence.request_id]

    def step_tokens(self, sequence: Sequence) -> int:
        return self.tokens[sequence.request_id]

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]


def sequence(name: str) -> Sequence:
    return Sequence(name, Sampling(), {}, (), {})


def names(scheduled: tuple[str, list[Sequence]] | None) -> tuple[str, list[str]] | None:
    return scheduled and (scheduled[0], [one.request_id for one in scheduled[1]])


def test_prefill_comes_first_and_stays_within_rows_and_tokens() -> None:
    stage = Lengths({"a": 60, "b": 30, "c": 20, "d": 5, "e": 200}, dict.fromkeys("abcde", "prefill"))
    scheduler = ContinuousBatching(stage, rows=4, prefill_tokens=100)
    for name in "abcde":
        scheduler.add(sequence(name))
    assert names(scheduler.schedule()) == ("prefill", ["a", "b"])
    stage.kinds |= {"a": "decode", "b": "decode", "d": None}
    assert names(scheduler.schedule()) == ("prefill", ["c"])
    stage.kinds["c"] = "decode"
    assert names(scheduler.schedule()) == ("prefill", ["e"])
    stage.kinds |= {"e": None, "d": "prefill"}
    assert names(scheduler.schedule()) == ("decode", ["a", "b", "c"])
    scheduler.remove(scheduler.running[1])
    assert [one.request_id for one in scheduler.running] == ["a", "e", "c"]
    assert names(scheduler.schedule()) == ("prefill", ["d"])


def test_nothing_to_do_is_no_step() -> None:
    stage = Lengths({"a": 1}, {"a": None})
    for scheduler in (ContinuousBatching(stage, 4, 10), LeastServedBatching(stage, 4, 10)):
        assert scheduler.schedule() is None
        scheduler.add(sequence("a"))
        assert scheduler.schedule() is None


def test_rows_stay_dense_and_follow_their_sequences() -> None:
    draw = random.Random(1)
    stage = Lengths({}, {})
    scheduler = ContinuousBatching(stage, rows=7, prefill_tokens=100)
    for index in range(400):
        if draw.random() < 0.5:
            name = f"r{index}"
            stage.tokens[name], stage.kinds[name] = draw.randint(1, 40), "prefill"
            scheduler.add(sequence(name))
        scheduled = scheduler.schedule()
        if scheduled and scheduled[0] == "prefill":
            for one in scheduled[1]:
                stage.rows[one.row], stage.kinds[one.request_id] = one.request_id, "decode"
        if scheduler.running and draw.random() < 0.4:
            scheduler.remove(draw.choice(scheduler.running))
        assert [one.row for one in scheduler.running] == list(range(len(scheduler.running))) and len(
            scheduler.running
        ) <= 7
        assert all(stage.rows[one.row] == one.request_id for one in scheduler.running)


def test_a_sequence_that_waits_can_be_removed() -> None:
    stage = Lengths({"a": 1, "b": 1}, {"a": None, "b": "prefill"})
    scheduler = ContinuousBatching(stage, rows=1, prefill_tokens=10)
    first, second = sequence("a"), sequence("b")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.remove(first)
    assert names(scheduler.schedule()) == ("prefill", ["b"])


def test_first_chunks_do_not_wait_behind_later_ones() -> None:
    stage = Lengths(
        {"old": 50, "older": 50, "new": 4, "idle": 4}, {"old": "vocode", "older": "vocode", "new": "vocode"}
    )
    stage.kinds["idle"] = None
    scheduler = LeastServedBatching(stage, max_batch=8, step_tokens=60)
    for name, steps in (("older", 3), ("old", 2), ("new", 0), ("idle", 0)):
        one = sequence(name)
        one.steps = steps
        scheduler.add(one)
    assert names(scheduler.schedule()) == ("vocode", ["new", "old"])
    stage.kinds["new"] = None
    assert names(scheduler.schedule()) == ("vocode", ["old"])
