"""The gaps of a run, for the trace view."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from omni_lab.frames import Run
from omni_lab.views import checks
from omni_lab.views.around_gap import around_gap, length, parts
from omni_lab.views.figures import load_label
from omni_lab.views.steps import CAUSE_NAMES, at_load, gaps, loads_of

MEANS = {
    "wait for input": "requests were there, but the stage before had not yet sent what the next step needs",
    "wait for a slot": "there was no room in the output path, or, inline, other stages had the thread",
    "schedule": "the loop took in messages and chose the next batch",
    "build payloads": "the loop built what the step before had made for the next stage",
    "send": "the loop handed payloads over",
    "other": "the rest of a turn of the loop",
}
"""What each cause is, in words."""

BESIDE = {"build payloads": "the loop copied what a thread beside it then builds and sends"}
"""The same where async_output is in effect."""

COLUMNS = {name: cause for cause, name in CAUSE_NAMES.items()}
"""What a cause is called in a table of gaps."""

STRANGE = 10
"""A cause that took so many times its median was most likely interrupted."""


class RunGaps:
    """The step gaps of a run's repeats without a capture. Raises ValueError if none were measured.

    `choices`: what can be chosen. `first`: the choice that has the longest gap of all. `waiting`: whether a gap is at
    first taken with its waiting; without, it is the gap of the loop.
    """

    waiting = False

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps = checks.counted(run, run.steps)
        self.found = gaps(self.steps).dropna(subset="gap_us")
        if self.found.empty:
            raise ValueError(f"{run.path}/steps.parquet: expected steps with their gaps, and there are none")
        names = {name: self.found[name].drop_duplicates().sort_values() for name in ("stage", "configuration")}
        loads = [None if pd.isna(load) else float(load) for load in loads_of(self.found)]
        self.choices: dict[str, list[tuple[str, Any]]] = {
            **{name: [(str(value), str(value)) for value in values] for name, values in names.items()},
            "concurrency": [(load_label(load), load) for load in loads],
        }
        longest = self.found.loc[self.found["gap_us"].idxmax()]
        load = None if pd.isna(longest["concurrency"]) else float(longest["concurrency"])
        self.first = {name: str(longest[name]) for name in names} | {"concurrency": load}

    def gaps(self, choice: Mapping[str, Any], waiting: bool) -> pd.DataFrame:
        """The gaps that were chosen, the longest first, with their `length_us`."""
        here = at_load(self.found, choice["concurrency"])
        for name in ("stage", "configuration"):
            here &= self.found[name] == choice[name]
        own = self.found[here]
        lengths = own["gap_us"] + own["input_us"] + own["slot_us"] if waiting else own["gap_us"]
        return own.assign(length_us=lengths).sort_values("length_us", ascending=False, kind="stable")

    def subject(self, choice: Mapping[str, Any]) -> str:
        load = choice["concurrency"]
        where = "in open loop" if load is None else f"at {load_label(load)} in flight"
        return f"gap of the {choice['stage']} in {choice['configuration']} {where}"

    def parts(self, gap: pd.Series, waiting: bool) -> list[tuple[str, float]]:
        """What a gap is made of, in µs, the longest first."""
        return parts(gap, waiting)

    def explain(self, gap: pd.Series, waiting: bool) -> str:
        """What its first cause is and how long that usually takes, and where the gap lies."""
        cause, us = self.parts(gap, waiting)[0]
        means = (BESIDE if self._beside(gap["configuration"]) else {}).get(cause, MEANS[cause])
        usual = self.gaps(gap, waiting)[f"{COLUMNS[cause]}_us"].median()
        told = f"{cause.capitalize()}: {means}. Its median here is {length(usual)}"
        if us > STRANGE * usual and cause not in (CAUSE_NAMES["input"], CAUSE_NAMES["slot"]):
            told += "; so much more says that something else had the processor, or Python's lock, meanwhile"
        others = gap["input_us"] + gap["slot_us"]
        beside = f", beside {length(others)} of waiting" if others and not waiting else ""
        return (
            f"{told}. The gap lies before step {gap['step']:,} ({gap['kind']}, batch {gap['batch']}) of repeat "
            f"{gap['repeat']}{beside}."
        )

    def _beside(self, configuration: str) -> bool:
        """Whether payloads are built beside the loop."""
        known = (self.run.record.get("configurations") or {}).get(configuration) or {}
        effective = (known.get("effective") or {}).get("optimizations") or {}
        return bool(effective.get("async_output"))

    def line(self, gap: pd.Series, waiting: bool) -> str:
        """A gap in a list: its first causes, and which step comes after it."""
        made_of = self.parts(gap, waiting)
        whole = sum(us for _, us in made_of)
        told = ", ".join(f"{name} {100 * us / whole:.0f} %" for name, us in made_of[:2] if us > whole / 100)
        return f"{told} · {gap['kind']}, batch {gap['batch']}"

    def usual_ms(self, own: pd.DataFrame) -> float:
        """How much to show around a gap: some steps."""
        return float(3 * (own["end_ns"] - own["start_ns"]).median() / 1e6)

    def figure(self, gap: pd.Series, context_ms: float) -> go.Figure:
        return around_gap(self.steps, gap, context_ms)

    def trace_file(self, choice: Mapping[str, Any]) -> Path | None:
        """The merged trace of a capture of this cell, if there is one."""
        for one in checks.runs_of(self.run, pd.Series(choice)):
            if merged := (one.get("traces") or {}).get("merged"):
                return self.run.path / merged
        return None
