"""Reasons to doubt a run's figures, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from omni_lab.frames import Run
from omni_lab.views.figures import load_label

CLIENT_BUSY = 0.5
"""Above this share of a core the client itself may delay what it measures."""

LITTLE = 0.1
"""Tolerated distance of `littles_law_ratio` from 1."""

FIRST_WAVE = 0.25
"""Above this share the requests that all started at once, on an empty system, colour the figures."""


def warnings(run: Run) -> list[str]:
    """One sentence for each reason; empty if there is none."""
    if run.cells.empty:
        return ["The run has no finished cell."]
    reasons = [
        f"{_name(cell)}: {reason}" for _, cell in run.cells.iterrows() for reason in _reasons(cell, _inline(run, cell))
    ]
    return not_in_effect(run.record) + reasons


def not_in_effect(record: dict[str, Any]) -> list[str]:
    """One sentence for each toggle that was asked for and is not in effect in a configuration."""
    return [
        f"{name}: optimizations.{key} is not in effect: {note}."
        for name, configuration in record.get("configurations", {}).items()
        for key, note in ((configuration.get("effective") or {}).get("notes") or {}).items()
    ]


def _inline(run: Run, cell: pd.Series) -> bool:
    """Whether the stages ran in the client's own process, so that its busy share says nothing."""
    configuration = run.record.get("configurations", {}).get(cell["configuration"], run.record)
    return configuration.get("experiment", {}).get("executor") == "inline"


def _reasons(cell: pd.Series, inline: bool) -> Iterator[str]:
    completed, failed = _number(cell, "completed"), _number(cell, "failed")
    if completed == 0:
        yield "no request was completed."
    if failed:
        yield f"{failed:g} of {failed + (completed or 0):g} requests failed; latencies are those of the others."
    busy = _number(cell, "client_busy_share")
    if busy is not None and busy > CLIENT_BUSY and not inline:
        yield f"the client was busy {busy:.0%} of the time, so it may delay what it measures."
    little = _number(cell, "littles_law_ratio")
    if little is not None and abs(little - 1) > LITTLE and not failed:
        yield (
            f"Little's law does not hold: throughput times latency is {little:.2f} times the requests in flight, so "
            "the run is too short for a steady state or the client lost time."
        )
    if cut := _number(cell, "hit_max_frames"):
        yield f"the speech of {cut:g} answers was cut at the limit of codec frames."
    if lost := _number(cell, "lost_steps"):
        yield f"{lost:g} steps were not recorded, so the stages' figures are of the rest."
    first, concurrency = _number(cell, "first_wave_requests"), _number(cell, "concurrency")
    if first and completed and concurrency != 1 and first / completed > FIRST_WAVE:
        yield f"{min(1.0, first / completed):.0%} of the requests are of the first wave, which started all at once."
    repeats = _number(cell, "repeats")
    if repeats is not None and repeats < 2:
        yield "one repeat only, so the spread between repeats is not measured."


def _name(cell: pd.Series) -> str:
    return f"{cell['configuration']}, concurrency {load_label(cell['concurrency'])}"


def _number(cell: pd.Series, name: str) -> float | None:
    value = cell.get(name)
    return None if value is None or pd.isna(value) else float(value)
