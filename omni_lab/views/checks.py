"""What must agree in a run that can be trusted: what stages gave and clients got, causes and gaps, clocks, captures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from omni_lab.frames import CELL, Run
from omni_lab.metrics.definitions import FRAME_SAMPLES
from omni_lab.metrics.phases import CAUSES
from omni_lab.metrics.relative import undisturbed
from omni_lab.views.figures import load_label
from omni_lab.views.steps import at_load, gaps

TAIL_SAMPLES = 555
"""A decode of n > 0 frames has n x FRAME_SAMPLES - TAIL_SAMPLES samples (docs/architecture.md)."""

SUM_SHARE, SUM_US = 0.01, 1.0
"""The causes of a gap may miss the time between two steps by this share or these µs, whichever is more."""

TOTALS = (
    ("text tokens", ("thinker_tokens", "client_tokens"), ("the thinker's steps gave", "clients received")),
    (
        "frames",
        ("talker_frames", "code2wav_frames", "client_frames"),
        ("the talker's steps gave", "code2wav's steps took", "clients received"),
    ),
    ("audio samples", ("frame_samples", "client_samples"), ("the clients' frames make", "clients received")),
)
"""Columns of `totals` that must be equal, and what each of them counts."""

CAPTURED = ("step_ms", "gap_us_median", "request_throughput_per_s")
"""Figures of a captured repeat that are set beside those of the others."""


def counted(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """The requests or steps of the repeats that count in the cells' figures: those without a capture, if any."""
    keep = pd.Series(False, rows.index)
    for cell in run.record.get("cells", []):
        repeats = {one["repeat"] for one in undisturbed(cell.get("runs") or [])}
        keep |= _of_cell(rows, cell) & rows["repeat"].isin(repeats)
    return rows[keep]


def runs_of(run: Run, row: pd.Series) -> list[dict[str, Any]]:
    """The repeats, as run.json has them, of the cell that a row of any table is of."""
    key = (row["configuration"], load_label(row["concurrency"]))
    cells = run.record.get("cells", [])
    return next((c.get("runs") or [] for c in cells if (c["configuration"], load_label(c["concurrency"])) == key), [])


def others_share(runs: list[dict[str, Any]]) -> float | None:
    """Share of the machine's processors that other programs used in the worst repeat that counts; None: not known."""
    shares = [one["others_cpu_share"] for one in undisturbed(runs) if one.get("others_cpu_share") is not None]
    return max(shares, default=None)


def sums(run: Run) -> pd.DataFrame:
    """For each stage of each cell the mean gap, with waiting, found in two ways, in µs.

    `causes_us`: the sum of the mean causes in `Run.stages`; `between_us`: from the end of each step to the start of the
    next, less idle time, from `Run.steps`; mean of the repeats' means. `agree` says whether they do, None if one was
    not measured.
    """
    keys = [*CELL, "stage"]
    names = [f"gap_{cause}_us" for cause in CAUSES]
    result = run.stages[keys].assign(causes_us=run.stages.reindex(columns=names).sum(axis=1, skipna=False))
    repeats = gaps(counted(run, run.steps)).groupby([*keys, "repeat"], dropna=False, observed=True)
    cells = repeats["between_us"].mean().groupby(level=keys, dropna=False, observed=True)
    between = cells.mean().rename("between_us").reset_index()
    text = {"configuration": str, "stage": str}  # also where there are none: a server tells of no stages
    result = result.astype(text).merge(between.astype(text), on=keys, how="left")
    off = (result["causes_us"] - result["between_us"]).abs()
    agree = (off <= SUM_US) | (off <= SUM_SHARE * result["between_us"])
    return result.assign(agree=agree.astype(object).where(off.notna(), None), stage=run.stages["stage"])


def totals(run: Run) -> pd.DataFrame:
    """What all steps of each cell gave and what its clients received, summed over the repeats; NaN: not measured.

    The columns of TOTALS, `lost_steps` and `failed`. Text is compared where every completed request asked for it.
    """
    rows = []
    for cell in run.record.get("cells", []):
        steps = run.steps[_of_cell(run.steps, cell)]
        requests = run.requests[_of_cell(run.requests, cell)]
        made = steps.groupby(steps["stage"].astype(str))["tokens"].sum()
        lost = [one["lost_steps"] for one in cell.get("runs") or [] if one.get("lost_steps") is not None]
        rows.append(
            {
                **{key: cell[key] for key in CELL},
                "lost_steps": sum(lost) if lost else None,
                "failed": int(requests["error"].notna().sum()) if "error" in requests else None,
                "thinker_tokens": made.get("thinker"),
                "talker_frames": made.get("talker"),
                "code2wav_frames": made.get("code2wav"),
                **_received(requests),
            }
        )
    names = [*CELL, "lost_steps", "failed", *(name for _, columns, _ in TOTALS for name in columns)]
    frame = pd.DataFrame(rows, columns=names)
    return frame.astype({name: float for name in names[1:]})


def differences(total: pd.Series) -> list[str]:
    """What should be equal in a row of `totals` and is not, in words. Failed requests and lost steps excuse it."""
    if total["failed"] > 0 or total["lost_steps"] > 0:
        return []
    found = []
    for what, columns, words in TOTALS:
        counts = [(word, total[name]) for word, name in zip(words, columns, strict=True) if pd.notna(total[name])]
        if len({count for _, count in counts}) > 1:
            told = ", ".join(f"{word} {count:,.0f}" for word, count in counts)
            most, least = max(count for _, count in counts), min(count for _, count in counts)
            found.append(f"{what} differ by {most - least:,.0f}: {told}")
    return found


def clock(run: Run) -> dict[str, Any] | None:
    """The step clock's cost: `cost_us` a step, and the `share` of the shortest mean step, `step_ms`, which is of `row`.

    None if one of the two was not measured.
    """
    cost = (run.record.get("environment") or {}).get("step_clock_us")
    measured = run.stages[run.stages["step_ms"] > 0] if "step_ms" in run.stages else run.stages.iloc[:0]
    if cost is None or measured.empty:
        return None
    shortest = measured.loc[measured["step_ms"].idxmin()]
    return {"cost_us": cost, "share": cost / 1e3 / shortest["step_ms"], "step_ms": shortest["step_ms"], "row": shortest}


def captures(run: Run) -> pd.DataFrame:
    """A row for each worker that was captured: the captured repeat beside the mean of the repeats without a capture.

    `steps`, `stopped_by`, `alignment_us` (bound of the clocks' error) and `error` as the capture tells them;
    `window_step_ms` of the worker's steps that were recorded, `rest_step_ms` of its others in that repeat;
    `gap_us_max`, the worker's longest gap in it, and `other_gap_us_max`, that of the others; and step_ms, gap_us_median
    and request_throughput_per_s of the captured repeat, each with `other_<name>` and `other_<name>_std`. NaN where
    there is no other repeat.
    """
    rows = [
        {**{key: cell[key] for key in CELL}, **row}
        for cell in run.record.get("cells", [])
        for one in cell.get("runs") or []
        if one.get("traces")
        for row in _captured(run, cell, one)
    ]
    figures = [f"{prefix}{name}" for name in CAPTURED for prefix in ("", "other_")]
    return pd.DataFrame(rows, columns=None if rows else [*CELL, "stage", "replica", "alignment_us", *figures])


def _captured(run: Run, cell: dict[str, Any], one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    others = [other for other in cell["runs"] if not other.get("traces")]
    steps = run.steps[_of_cell(run.steps, cell)]
    for worker in one["traces"].get("workers", []):
        stage, replica = worker["stage"], worker["replica"]
        of_worker = steps[(steps["stage"] == stage) & (steps["replica"] == replica)]
        longest = gaps(of_worker).groupby("repeat")["gap_us"].max()
        own = of_worker[of_worker["repeat"] == one["repeat"]]
        inside = (own["start_ns"] >= worker["start_ns"]) & (own["end_ns"] <= worker["end_ns"])
        took_ms = (own["end_ns"] - own["start_ns"]) / 1e6
        row = {name: worker[name] for name in ("stage", "replica", "steps", "stopped_by", "alignment_us", "error")}
        row["alignment_us"] = worker["alignment_us"] if worker["path"] else math.nan
        row |= {"window_step_ms": took_ms[inside].mean(), "rest_step_ms": took_ms[~inside].mean()}
        row["gap_us_max"] = longest.get(one["repeat"], math.nan)
        row["other_gap_us_max"] = longest.reindex([other["repeat"] for other in others]).max()
        for name in CAPTURED:
            values = pd.Series([_figure(other, stage, name) for other in others], dtype=float)
            row[name] = _figure(one, stage, name)
            row |= {f"other_{name}": values.mean(), f"other_{name}_std": values.std()}
        yield row


def _figure(one: dict[str, Any], stage: str, name: str) -> float | None:
    """A repeat's figure: of the stage, or of the whole cell where a stage has no such figure."""
    if name == "request_throughput_per_s":
        return one.get("request_throughput")
    return ((one.get("stages") or {}).get(stage) or {}).get(name)


def _received(requests: pd.DataFrame) -> dict[str, float | None]:
    """What the clients of a cell counted."""
    if requests.empty or not {"text_tokens", "codec_frames", "audio_chunk_samples", "finish_reason"} <= set(requests):
        return {}
    done = requests[requests["error"].isna()] if "error" in requests else requests
    told = all(isinstance(reason, dict) and "text" in reason for reason in done["finish_reason"])
    frames = requests["codec_frames"]
    return {
        "client_tokens": requests["text_tokens"].sum() if told else None,
        "client_frames": frames.sum(),
        "frame_samples": FRAME_SAMPLES * frames.sum() - TAIL_SAMPLES * (frames > 0).sum(),
        "client_samples": sum(sum(chunks) for chunks in requests["audio_chunk_samples"] if isinstance(chunks, list)),
    }


def _of_cell(frame: pd.DataFrame, cell: dict[str, Any]) -> pd.Series:
    """Which rows are of a cell of run.json."""
    return (frame["configuration"] == cell["configuration"]) & at_load(frame, cell["concurrency"])
