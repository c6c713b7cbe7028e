"""`python -m omni_lab.gaps TRACE...`: the time between the steps of any Chrome trace, and what fills it."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from omni_lab.command import DONE, FAILED, INTERRUPTED, WRONG, Parser
from omni_lab.tracing.chrome_json import TraceError
from omni_lab.tracing.compare import compare_gaps
from omni_lab.tracing.gaps import Analysis, analyse, trace_files

FIGURES = ("step_ms_median", "gap_us_median", "gap_us_p95", "gap_us_p99", "busy_share", "idle_share")
TOP = 8
"""Causes of a worker that the table shows."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status. An incomplete trace is an answer, not a failure."""
    options = _parser().parse_args(argv)
    try:
        with _bar(options.trace + ([options.compare] if options.compare else [])) as advance:
            analysis = analyse(options.trace, options.stage_regex, advance)
            other = analyse(options.compare, options.stage_regex, advance) if options.compare else None
    except (TraceError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {error!r}", file=sys.stderr)
        return FAILED
    change = None if other is None else compare_gaps(analysis.gaps, other.gaps)
    if options.json:
        print(json.dumps(as_json(analysis, other, change), indent=1))
    else:
        print(as_text(analysis))
        if other is not None:
            print(f"\nagainst {options.compare}\n{as_text(other)}\n\n{_change_text(change)}")
    return DONE


def as_json(analysis: Analysis, other: Analysis | None = None, change: pd.DataFrame | None = None) -> dict[str, Any]:
    """The contract's `workers`; with a second trace also `other`, its workers, and `comparison`, one entry a figure.

    `causes` are shares of a worker's gap time that add up to 1. A figure that is not known is null.
    """
    result: dict[str, Any] = {"workers": _workers(analysis)}
    if other is not None and change is not None:
        result["other"] = _workers(other)
        result["comparison"] = [_plain(row) for row in change.to_dict("records")]
    return result


def as_text(analysis: Analysis) -> str:
    """Tables to read: workers, gaps by batch where batches are known, and the longest causes."""
    workers = analysis.workers
    lines = [f"{row.worker}: {row.status}, {row.reason or row.found}" for row in workers.itertuples()]
    lines += [f"{row.worker}: {row.found}" for row in workers.itertuples() if row.reason and row.found]
    figures = ["worker", "steps", *FIGURES[:2], "work_us_median", "gap_us_mean", *FIGURES[2:4]]
    figures += ["gap_share", "idle_share"]
    parts = ["\n".join(lines), _table(workers[figures])]
    batches = analysis.by_batch()
    if (batches["batch"] >= 0).any():
        parts.append(f"gaps in µs by the batch of the step after them\n{_table(batches)}")
    if len(analysis.devices) > 1:
        parts.append(_table(analysis.devices))
    for worker, causes in analysis.causes.groupby("worker", sort=False):
        shown = causes.head(TOP).drop(columns="worker").assign(cause=lambda frame: frame["cause"].str.slice(0, 70))
        parts.append(f"what {worker} did in its gaps ({len(causes)} kinds of ranges)\n{_table(shown)}")
    return "\n\n".join(parts)


def _workers(analysis: Analysis) -> list[dict[str, Any]]:
    found = []
    for row in analysis.workers.to_dict("records"):
        causes = analysis.causes[analysis.causes["worker"] == row["worker"]]
        reason = "; ".join(part for part in (row["reason"], row["found"]) if part)
        head = {"name": row["worker"], "status": row["status"], "reason": reason, "steps": row["steps"]}
        figures = {key: row[key] for key in FIGURES}
        summed = causes.groupby("cause", sort=False)["share"].sum()
        found.append(_plain(head | figures) | {"causes": {cause: float(share) for cause, share in summed.items()}})
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _change_text(change: pd.DataFrame) -> str:
    if change.empty:
        return "nothing to compare: no worker has gaps in both, by name"
    lines = []
    for row in change.to_dict("records"):
        row = _plain(row)
        ratio = "no ratio" if row["ratio"] is None else f"x{row['ratio']:.3g}"
        interval = "no interval" if row["low"] is None else f"{row['low']:.3g}-{row['high']:.3g}"
        figures = f"{row['before_us']:.4g} -> {row['after_us']:.4g} µs"
        lines.append(f"{row['worker']}: {row['figure']} gap {figures}, {ratio} ({interval}), change: {row['verdict']}")
    return "\n".join(lines)


def _table(frame: pd.DataFrame) -> str:
    return frame.to_string(index=False, float_format=_short, na_rep="-")


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="omni_lab.gaps", description=__doc__)
    parser.add_argument("trace", nargs="+", type=Path, metavar="TRACE", help="a .json or .json.gz, or a directory")
    parser.add_argument(
        "--stage-regex",
        type=_expression,
        metavar="R",
        help="names of ranges that mark steps; groups number, kind, batch and tokens are read",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="the trace after a change; TRACE is before")
    return parser


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, and {text!r} is none: {error}") from None
    return text


@contextmanager
def _bar(paths: list[Path]) -> Iterator[Callable[[int], object]]:
    total = sum(path.stat().st_size for one in paths for path in trace_files(one))
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, file=sys.stderr, leave=False) as shown:
        yield shown.update


if __name__ == "__main__":
    sys.exit(main())
