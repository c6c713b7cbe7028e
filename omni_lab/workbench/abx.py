"""Blind ABX listening: how likely so many right answers are by guessing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from typing import Any

LEVEL = 0.05
"""Below this probability a result counts as heard."""


@dataclass(frozen=True)
class Score:
    """What the trials so far say. `p_value`: probability of at least as many right answers by guessing."""

    correct: int
    trials: int

    @property
    def p_value(self) -> float:
        return p_value(self.correct, self.trials)

    @property
    def verdict(self) -> str:
        """One sentence; few trials cannot show anything, and hearing none is no proof that there is none."""
        if not self.trials:
            return "no trial yet"
        if self.p_value < LEVEL:
            return "you hear a difference"
        if p_value(self.trials, self.trials) >= LEVEL:
            return "too few trials to tell"
        return "no difference shown"


def p_value(correct: int, trials: int) -> float:
    """Probability of at least `correct` right answers in `trials` guesses: the exact one-sided binomial test at 1/2.

    Raises ValueError unless 0 <= correct <= trials.
    """
    if not 0 <= correct <= trials:
        raise ValueError(f"correct: expected 0 to {trials}, the number of trials, found {correct}")
    return sum(comb(trials, right) for right in range(correct, trials + 1)) / 2**trials


def score(trials: Iterable[dict[str, Any]]) -> Score:
    """Counts trials, each with the take that was `x` and the take that was the `answer`."""
    hits = [trial["x"] == trial["answer"] for trial in trials]
    return Score(sum(hits), len(hits))
