"""Figures of a cell: one repeat's from its rows, and the cell's from its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from omni_lab.metrics.continuity import THRESHOLD_S
from omni_lab.metrics.definitions import DISTRIBUTIONS
from omni_lab.metrics.phases import CAUSES, HOST, STEP
from omni_lab.metrics.records import RequestRow, StepRow
from omni_lab.metrics.request import RequestFigures, request_figures

Counts = dict[str, int]
Figures = dict[str, Any]

COUNTED = ("graph_replays", "eager_steps", "captured_prefills", "eager_prefills", "beside_ns")
"""What workers count that becomes a figure of their stage."""


def repeat_figures(
    rows: Sequence[RequestRow], concurrency: int | None, sample_rate: int, cpu_s: float, fixed_frames: bool = False
) -> Figures:
    """Figures of one repeat of a cell from its requests, in the order in which they were to be sent.

    `concurrency` None is open loop; `cpu_s` is the processor time that the client spent meanwhile;
    `fixed_frames` says that the length of the speech was prescribed.
    """
    done = [(row, request_figures(row, sample_rate)) for row in rows if row.error is None]
    figures = [one for _, one in done]
    start_ns, end_ns = min(row.sent_ns for row in rows), max(row.end_ns for row in rows)
    duration = max(end_ns - start_ns, 1) / 1e9
    underruns = [one.audio_underrun_s for one in figures if one.audio_underrun_s is not None]
    in_flight = _mean_in_flight(rows, start_ns, end_ns)
    latencies = [one.e2el_ms for one in figures if one.e2el_ms is not None]
    return {
        "completed": len(done),
        "failed": len(rows) - len(done),
        "duration": duration,
        "request_throughput": len(done) / duration,
        "output_throughput": sum(one.text_tokens for one in figures) / duration,
        "audio_throughput": sum(one.audio_duration_s or 0.0 for one in figures) / duration,
        **_distributions(figures),
        "audio_continuity_ok_rate": _mean([float(value <= THRESHOLD_S) for value in underruns]),
        "mean_dispatch_delay_ms": _mean([one.dispatch_delay_ms for one in figures]),
        "mean_requests_in_flight": in_flight,
        "littles_law_ratio": sum(latencies) / 1000 / duration / in_flight if latencies else None,
        "hit_max_frames": None if fixed_frames else sum(row.reasons.get("audio") == "length" for row, _ in done),
        "steady_request_throughput": _steady_throughput(rows, concurrency),
        "client_busy_share": cpu_s / duration,
        "first_wave": _first_wave([one for row, one in done if row.index < (concurrency or 0)]),
    }


def stage_figures(steps: Iterable[StepRow], duration_s: float, replicas: Mapping[str, int]) -> dict[str, Figures]:
    """Figures of each stage that took steps. `replicas` says how many workers a stage has, if not one."""
    stages = {}
    for stage, own in groupby(sorted(steps, key=lambda row: (row.stage, row.replica, row.start_ns)), lambda r: r.stage):
        rows = list(own)
        step_s = sum(row.end_ns - row.start_ns for row in rows) / 1e9
        after = [row for before, row in pairwise(rows) if before.replica == row.replica and row.schedule_ns]
        gaps = [sum(getattr(row, f"{phase}_ns") for phase in HOST) / 1e3 for row in after]
        work_s = step_s + sum(gaps) / 1e6
        stages[stage] = {
            "steps": len(rows),
            "mean_batch": _mean([row.batch for row in rows]),
            "step_ms": step_s * 1e3 / len(rows),
            **{f"step_{phase}_us": _mean([getattr(row, f"{phase}_ns") / 1e3 for row in rows]) for phase in STEP},
            "gap_us_median": _percentile(gaps, 50),
            "gap_us_p95": _percentile(gaps, 95),
            "gap_us_p99": _percentile(gaps, 99),
            **{f"gap_{cause}_us": _mean([getattr(row, f"{cause}_ns") / 1e3 for row in after]) for cause in CAUSES},
            "busy_ratio": work_s / duration_s / replicas.get(stage, 1),
            "tokens_per_s": sum(row.tokens for row in rows) / work_s if work_s else None,
        }
    return stages


def add_counts(stages: Figures, before: dict[str, Counts], after: dict[str, Counts]) -> None:
    """Give each stage what its workers counted between two readings.

    That is steps and prefills that were graph replays, eager ones, and `beside_us`: the time a step in which payloads
    were built and sent beside the step loop.
    """
    for worker, counts in after.items():
        figures = stages.get(worker.rpartition("_r")[0])
        for name in COUNTED if figures else ():
            if name in counts:
                earlier = before.get(worker, {}).get(name, 0)
                earlier = 0 if counts[name] < earlier else earlier  # the worker's process was replaced meanwhile
                figures[name] = figures.get(name, 0) + counts[name] - earlier
    for figures in stages.values():
        if "beside_ns" in figures:
            figures["beside_us"] = figures.pop("beside_ns") / 1e3 / figures["steps"]


def cell_figures(repeats: Sequence[Figures]) -> Figures:
    """The mean over repeats of every figure, each followed by its `_std`; sections are averaged one by one."""
    figures: Figures = {}
    for name in dict.fromkeys(name for repeat in repeats for name in repeat):
        values = [repeat.get(name) for repeat in repeats]
        if any(isinstance(value, dict) for value in values):
            figures[name] = cell_figures([value for value in values if value])
            continue
        measured = [value for value in values if value is not None]
        figures[name] = _mean(measured)
        figures[f"{name}_std"] = statistics.stdev(measured) if len(measured) > 1 else None
    return figures


def _distributions(figures: Sequence[RequestFigures]) -> Figures:
    result: Figures = {}
    for name in DISTRIBUTIONS:
        found = [getattr(one, name) for one in figures]
        values = [value for one in found for value in (one if isinstance(one, list) else [one]) if value is not None]
        result |= {f"mean_{name}": _mean(values), f"median_{name}": _percentile(values, 50)}
        result[f"p99_{name}"] = _percentile(values, 99)
    return result


def _first_wave(figures: Sequence[RequestFigures]) -> Figures:
    means = {name: value for name, value in _distributions(figures).items() if name.startswith("mean_")}
    return {"completed": len(figures)} | means


def _mean_in_flight(rows: Sequence[RequestRow], start_ns: int, end_ns: int) -> float:
    """The number of requests in flight, counted up at each send and down at each end, averaged over time."""
    changes = sorted([(row.sent_ns, 1) for row in rows] + [(row.end_ns, -1) for row in rows])
    area, flying = 0, 0
    for (time_ns, change), (next_ns, _) in pairwise([*changes, (end_ns, 0)]):
        flying += change
        area += flying * (next_ns - time_ns)
    return area / max(end_ns - start_ns, 1)


def _steady_throughput(rows: Sequence[RequestRow], concurrency: int | None) -> float | None:
    if concurrency is None or len(rows) <= concurrency:
        return None
    opens, closes = max(row.end_ns for row in rows[:concurrency]), max(row.sent_ns for row in rows)
    ends = [row.end_ns for row in rows if row.error is None and opens < row.end_ns <= closes]
    return len(ends) / (closes - opens) * 1e9 if ends else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
