"""A finished run as tidy tables: `load(run_dir)` gives cells, stages, requests, steps and more as DataFrames."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from omni_lab.metrics.phases import PHASES

UNITS = {
    "duration": "duration_s",
    "request_throughput": "request_throughput_per_s",
    "steady_request_throughput": "steady_request_throughput_per_s",
    "output_throughput": "output_throughput_tokens_per_s",
    "audio_throughput": "audio_throughput_s_per_s",
}
"""Names of run.json that lack a unit, and the column that states it. Ratios and counts stay as they are."""

CELL = ["configuration", "concurrency"]
STEPS = [
    *CELL,
    "repeat",
    "stage",
    "replica",
    "step",
    "start_ns",
    "end_ns",
    "batch",
    "tokens",
    "kind",
    *(f"{phase}_ns" for phase in PHASES),
]
RATIOS = [*CELL, "stage", "figure", "ratio", "low", "high", "verdict"]
CHUNKS = ["edge", "request", "index", "frames", "bytes", "produced_ns", "sent_ns", "received_ns", "final"]
QUALITY = [
    "id",
    *CELL,
    "repeat",
    "prompt",
    "index",
    "reference",
    "heard",
    "errors",
    "words",
    "character_errors",
    "characters",
    "definition",
    "duration_s",
    "loudness_lufs",
    "peak_dbtp",
    "clipped_samples",
    "edges",
    "edge_worst_db",
    "edge_percentile",
    "clicks",
    "leading_silence_s",
    "trailing_silence_s",
    "longest_pause_s",
    "words_per_s",
    "compared_with",
    "length_difference",
    "max_deviation",
    "compared_edge_percentile",
]


@dataclass(frozen=True)
class Run:
    """The tables of one run directory.

    `cells`: a row for each configuration and concurrency. `stages`: the same, times each stage. `ratios`: a row for
    each figure that was compared with the first configuration's, named as in `cells`, or as in `stages` with its
    stage. `requests`, `steps` and `chunks`: a row each. `quality`: a row for each recording, once
    `python -m omni_lab.quality RUN_DIR --report` has heard them (docs/quality.md). Units stand in the column names; a
    figure that was not measured is NaN. Absolute times (`*_ns`) are of one monotonic clock, all others count from the
    request's send time. `configuration` is a categorical whose order is that of the run, and rows are in that order,
    though repeats were run in turn. `record` is run.json as it is, with experiment, environment and definitions.
    """

    path: Path
    record: dict[str, Any]
    cells: pd.DataFrame
    stages: pd.DataFrame
    ratios: pd.DataFrame
    requests: pd.DataFrame
    steps: pd.DataFrame
    chunks: pd.DataFrame
    quality: pd.DataFrame


def load(run_dir: str | Path) -> Run:
    """Reads a run directory. Tables whose file the run did not write are empty, with their columns.

    Raises FileNotFoundError if there is no run.json, ValueError if a file cannot be parsed.
    """
    path = Path(run_dir)
    if not (path / "run.json").is_file():
        raise FileNotFoundError(f"{path}/run.json: no such file; give a run directory such as results/<name>/<time>")
    record = _json((path / "run.json").read_text("utf-8"), path / "run.json")
    if not isinstance(record, dict):
        raise ValueError(f"{path}/run.json: expected the record of a run, got a {type(record).__name__}")
    cells, stages = _cells(record)
    requests = _requests(path / "requests.jsonl")
    steps = _parquet(path / "steps.parquet", STEPS)
    chunks = _parquet(path / "chunks.parquet", CHUNKS)
    order = list(record.get("experiment", {}).get("stages") or {})
    names = dict.fromkeys([*order, *stages["stage"], *steps["stage"]])
    for frame in (stages, steps):
        frame["stage"] = pd.Categorical(frame["stage"], categories=list(names), ordered=True)
    stages = stages.sort_values(["cell", "stage"], ignore_index=True).drop(columns="cell")
    quality = _parquet(path / "quality.parquet", QUALITY)
    tables = (cells, stages, _ratios(record), requests, steps, chunks, quality)
    return Run(path, record, *_in_order(tables, [*(record.get("configurations") or {}), *cells["configuration"]]))


def _in_order(tables: Sequence[pd.DataFrame], configurations: Iterable[str]) -> Iterator[pd.DataFrame]:
    """The tables with `configuration` in this order; rows of one configuration stay as they are."""
    found = [name for table in tables if "configuration" in table for name in table["configuration"].unique()]
    order = pd.CategoricalDtype(list(dict.fromkeys([*configurations, *found])), ordered=True)
    for table in tables:
        if "configuration" in table:
            table = table.astype({"configuration": order})
            table = table.sort_values("configuration", kind="stable", ignore_index=True)
        yield table


def _cells(record: dict[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cells, their sections flattened (`first_wave_<name>`), and their stages, which carry the cell's number."""
    cells, stages = [], []
    for number, cell in enumerate(record.get("cells", [])):
        flat = {}
        for name, value in cell.items():
            if name == "stages":
                key = {label: cell[label] for label in CELL} | {"cell": number}
                stages += [{**key, "stage": stage, **figures} for stage, figures in (value or {}).items()]
            elif name == "relative":
                continue
            elif isinstance(value, dict):
                flat |= {f"{name}_{_with_unit(inner)}": figure for inner, figure in value.items()}
            elif not isinstance(value, list):
                flat[_with_unit(name)] = value
        cells.append(flat)
    return _table(cells, CELL), _table(stages, [*CELL, "cell", "stage"])


def _ratios(record: dict[str, Any]) -> pd.DataFrame:
    """The cells' `relative` sections, as they are in run.json, a row for each figure that has a ratio."""
    rows = []
    for cell in record.get("cells", []):
        for name, found in (cell.get("relative") or {}).items():
            *section, figure = name.split(".")
            key = {label: cell[label] for label in CELL} | {"stage": section[-1] if section else None}
            rows += [{**key, "figure": _with_unit(figure), **found}] if found else []
    return _table(rows, RATIOS)


def _requests(file: Path) -> pd.DataFrame:
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    rows = [_json(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    return _table(rows, ["id", *CELL, "repeat"])


def _parquet(file: Path, columns: list[str]) -> pd.DataFrame:
    """The file as a table; columns that its run did not measure are NaN."""
    if not file.is_file():
        return pd.DataFrame(columns=columns)
    try:
        found = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable parquet file ({error})") from error
    return found.reindex(columns=list(dict.fromkeys([*found.columns, *columns])))


def _table(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Rows as a table; a column of numbers and nulls becomes one of numbers and NaN, whatever came first."""
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)
    for name in frame.columns:
        values = frame[name]
        if values.dtype == object and all(isinstance(v, int | float) or v is None for v in values):
            frame[name] = pd.to_numeric(values)
    return frame


def _with_unit(name: str) -> str:
    base = name.removesuffix("_std")
    return UNITS.get(base, base) + name[len(base) :]


def _json(text: str, where: str | Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
