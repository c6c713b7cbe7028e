"""Reasons to doubt a run's figures, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from omni_lab.frames import Run
from omni_lab.views import checks
from omni_lab.views.figures import load_label

CLIENT_BUSY = 0.5
"""Above this share of a core the client itself may delay what it measures."""

LITTLE = 0.1
"""Tolerated distance of `littles_law_ratio` from 1."""

FIRST_WAVE = 0.25
"""Above this share the requests that all started at once, on an empty system, colour the figures."""

OTHERS = 0.2
"""Above this share of the machine's processors other programs colour the figures."""

CLOCK_SHARE = 0.01
"""Above this share of the shortest mean step the step clock's own cost colours the figures."""

ALIGNMENT_US = 100.0
"""Above this bound of the clocks' error, what a merged trace shows of two processes is not one order of events."""


def warnings(run: Run) -> list[str]:
    """One sentence for each reason; empty if there is none."""
    if run.cells.empty:
        return ["The run has no finished cell."]
    reasons = [
        f"{_name(cell)}: {reason}"
        for _, cell in run.cells.iterrows()
        for reason in _reasons(cell, checks.runs_of(run, cell), _inline(run, cell))
    ]
    return not_in_effect(run.record) + reasons + list(_unequal(run)) + list(_disturbed(run))


def findings(run: Run) -> list[str]:
    """What was checked and how it came out, a sentence each; what could not be checked is said too."""
    totals, found, cost = checks.totals(run), checks.sums(run), checks.clock(run)
    lost, measured = totals["lost_steps"].sum(), len(run.steps)
    if totals["lost_steps"].isna().all():
        said = ["Steps lost from the ring: not measured."]
    else:
        said = [f"{lost:,.0f} steps were lost from the ring; {measured:,} are in the record."]
    if cost:
        said.append(
            f"The step clock costs {cost['cost_us']:.2g} µs a step, {100 * cost['share']:.2g} % of the shortest mean "
            f"step ({cost['step_ms']:.3g} ms, {cost['row']['stage']} of {_name(cost['row'])})."
        )
    else:
        said.append("The step clock's own cost: not measured.")
    sums = found.dropna(subset=["agree"])
    agree = int(sums["agree"].astype(bool).sum())
    said.append(
        f"The causes of the gaps add up to the time between two steps in {agree} of {len(sums)} stages of cells."
        if len(sums)
        else "Causes of the gaps against the time between two steps: not measured."
    )
    shares = [checks.others_share(checks.runs_of(run, cell)) for _, cell in run.cells.iterrows()]
    known = [share for share in shares if share is not None]
    said.append(
        f"Other programs used at most {100 * max(known):.0f} % of the processors while a repeat ran "
        f"(known for {len(known)} of {len(shares)} cells)."
        if known
        else "What other programs used of the processors: not measured."
    )
    captured = checks.captures(run)
    if captured.empty:
        return [*said, "No repeat was captured with the profiler."]
    windows = captured[captured["steps"] > 0]
    error_us = windows["alignment_us"].max()
    clocks = "is not known" if pd.isna(error_us) else f"is at most {error_us:.3g} µs"
    told = f"Windows captured with the profiler: {len(windows)}; the error of their clocks {clocks}."
    without = len(captured) - len(windows)
    return [*said, f"{told} In {without} more no step was recorded." if without else told]


def not_in_effect(record: dict[str, Any]) -> list[str]:
    """One sentence for each toggle that was asked for and is not in effect in a configuration."""
    return [
        f"{name}: optimizations.{key} is not in effect: {note}."
        for name, configuration in record.get("configurations", {}).items()
        for key, note in ((configuration.get("effective") or {}).get("notes") or {}).items()
    ]


def _unequal(run: Run) -> Iterator[str]:
    """Where two ways to count the same thing differ."""
    for _, total in checks.totals(run).iterrows():
        yield from (f"{_name(total)}: {difference}." for difference in checks.differences(total))
    found = checks.sums(run)
    for _, row in found[found["agree"].eq(False)].iterrows():
        yield (
            f"{_name(row)}: the causes of the {row['stage']}'s gaps add up to {row['causes_us']:.4g} µs, but "
            f"{row['between_us']:.4g} µs lie between its steps."
        )


def _disturbed(run: Run) -> Iterator[str]:
    """Where measuring changed what was measured, or cannot tell it well enough."""
    cost = checks.clock(run)
    if cost and cost["share"] > CLOCK_SHARE:
        yield f"the step clock costs {cost['cost_us']:.2g} µs a step, {cost['share']:.1%} of the shortest mean step."
    for _, row in checks.captures(run).iterrows():
        worker = f"{_name(row)}: the capture of {row['stage']} {row['replica']}"
        if row["error"]:
            yield f"{worker} failed: {row['error']}."
        if row["alignment_us"] > ALIGNMENT_US:
            yield f"{worker} knows its times only within {row['alignment_us']:.0f} µs of the other processes."
        if pd.isna(row["other_step_ms"]):
            yield f"{worker} is in the figures, for there is no repeat without a capture."


def _inline(run: Run, cell: pd.Series) -> bool:
    """Whether the stages ran in the client's own process, so that its busy share says nothing."""
    configuration = run.record.get("configurations", {}).get(cell["configuration"], run.record)
    experiment = configuration.get("experiment", {})
    return experiment.get("executor") == "inline" and experiment.get("target", "pipeline") == "pipeline"


def _reasons(cell: pd.Series, runs: list[dict[str, Any]], inline: bool) -> Iterator[str]:
    completed, failed = _number(cell, "completed"), _number(cell, "failed")
    if completed == 0:
        yield "no request was completed."
    if failed:
        yield f"{failed:g} of {failed + (completed or 0):g} requests failed; latencies are those of the others."
    busy = _number(cell, "client_busy_share")
    if busy is not None and busy > CLIENT_BUSY and not inline:
        yield f"the client was busy {busy:.0%} of the time, so it may delay what it measures."
    others = checks.others_share(runs)
    if others is not None and others > OTHERS:
        yield (
            f"other programs used {100 * others:.0f} % of the processors, so times are longer than they would be alone."
        )
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
    first, concurrency = _number(cell, "first_wave_completed"), _number(cell, "concurrency")
    if first and completed and concurrency != 1 and first / completed > FIRST_WAVE:
        yield f"{min(1.0, first / completed):.0%} of the requests are of the first wave, which started all at once."
    repeats = _number(cell, "repeats")
    if repeats is not None and repeats < 2:
        what = "one repeat only"
        if len(runs) > 1 and any("traces" in one for one in runs):
            rest = "the other was" if len(runs) == 2 else "the others were"
            what = f"one of {len(runs)} repeats counts, {rest} captured"
        yield f"{what}, so the spread between repeats is not measured."


def _name(cell: pd.Series) -> str:
    return f"{cell['configuration']}, concurrency {load_label(cell['concurrency'])}"


def _number(cell: pd.Series, name: str) -> float | None:
    value = cell.get(name)
    return None if value is None or pd.isna(value) else float(value)
