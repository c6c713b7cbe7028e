"""The run directory: every finished repeat of a cell is written at once, so that any stop keeps what was done.

`run.json` is written last and says which repeats count; rows of others, left by a killed run, are dropped.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import soundfile

from omni_lab.experiment import Experiment, ExperimentError
from omni_lab.metrics.aggregate import Figures, cell_figures
from omni_lab.metrics.definitions import DEFINITIONS
from omni_lab.metrics.records import ChunkRow, RequestRow, StepRow
from omni_lab.metrics.relative import compare, undisturbed
from omni_lab.metrics.request import request_figures

SCHEMA_VERSION = 1

Key = tuple[str, int | None, int]
"""A repeat of a cell: configuration, concurrency (None in open loop), repeat."""

_KEY = [("configuration", pa.string()), ("concurrency", pa.int64()), ("repeat", pa.int64())]


def _schema(row: type) -> pa.Schema:
    kinds = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_()}
    return pa.schema([*_KEY, *((field.name, kinds[field.type]) for field in dataclasses.fields(row))])


SCHEMAS = {"steps.parquet": _schema(StepRow), "chunks.parquet": _schema(ChunkRow)}


class RunDirectory:
    """A run on disk. `record` is run.json as it stands."""

    def __init__(self, path: Path, experiment: Experiment, configurations: Sequence[Experiment]) -> None:
        self.path = path
        self.record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "experiment": experiment.model_dump(mode="json"),
            "definitions": DEFINITIONS,
            "environment": {},
            "configurations": {one.name: {"experiment": one.model_dump(mode="json")} for one in configurations},
            "cells": [],
        }
        self.order = [(one.name, load) for one in configurations for load in one.workload.loads]
        self.tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()}

    @property
    def finished(self) -> set[Key]:
        return {
            (cell["configuration"], cell["concurrency"], run["repeat"])
            for cell in self.record["cells"]
            for run in cell["runs"]
        }

    def create(self) -> None:
        """Starts an empty directory. Raises ExperimentError where there is something already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ExperimentError(f"--out {self.path}: expected a new or empty directory; --resume goes on with a run")
        self.path.mkdir(parents=True, exist_ok=True)

    def resume(self) -> None:
        """Takes over the finished repeats of the directory, and drops what was left half-written.

        Raises ExperimentError if it holds another experiment.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "run.json"
        if not file.is_file():
            if any(path.name not in (*SCHEMAS, "requests.jsonl", "audio", "traces") for path in self.path.iterdir()):
                raise ExperimentError(f"--out {self.path}: expected the directory of a run, there is no run.json")
            (self.path / "requests.jsonl").unlink(missing_ok=True)
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            self._check_same(found)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ExperimentError):
                raise
            raise ExperimentError(f"{file}: expected a run of schema version {SCHEMA_VERSION}: {error!r}") from None
        self.record = found
        compare(self.record["cells"], base=self.order[0][0])
        kept = [line for line in self._request_lines() if self._key(line) in self.finished]
        _replace(self.path / "requests.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        for name in SCHEMAS:
            if (self.path / name).is_file():
                table = pa.parquet.read_table(self.path / name)
                keep = [self._key(row) in self.finished for row in table.select([k for k, _ in _KEY]).to_pylist()]
                self.tables[name] = table.filter(pa.array(keep, pa.bool_()))

    def opened(self, configuration: str, effective: dict[str, Any]) -> None:
        """A target of the configuration has started: what is in effect, and beside earlier starts how long it took."""
        record = self.record["configurations"][configuration]
        record["effective"] = {name: value for name, value in effective.items() if name != "start"}
        if start := effective.get("start"):
            record.setdefault("starts", []).append(start)

    def add(
        self,
        key: Key,
        figures: Figures,
        requests: Iterable[dict[str, Any]],
        steps: Iterable[StepRow],
        chunks: Iterable[ChunkRow],
        traces: dict[str, Any] | None = None,
    ) -> None:
        """Writes one finished repeat of a cell: requests and rows first, then the run.json that counts them.

        `traces` is what was captured meanwhile: that repeat does not count in the cell's figures if there are others.
        """
        configuration, concurrency, repeat = key
        labels = dict(zip((name for name, _ in _KEY), key, strict=True))
        with (self.path / "requests.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**line, **labels}) + "\n" for line in requests)
        for (name, schema), rows in zip(SCHEMAS.items(), (steps, chunks), strict=True):
            new = pa.Table.from_pylist([labels | dataclasses.asdict(row) for row in rows], schema)
            self.tables[name] = pa.concat_tables([self.tables[name], new])
            scratch = self.path / f".{name}"
            pa.parquet.write_table(self.tables[name], scratch)
            os.replace(scratch, self.path / name)
        runs = next((cell["runs"] for cell in self.record["cells"] if self._same_cell(cell, key)), [])
        runs = [*runs, {"repeat": repeat, **figures, **({"traces": traces} if traces else {})}]
        counted = undisturbed(runs)
        aside = ("repeat", "traces")
        averaged = cell_figures([{name: value for name, value in run.items() if name not in aside} for run in counted])
        cell = {"configuration": configuration, "concurrency": concurrency, "repeats": len(counted), **averaged}
        others = [other for other in self.record["cells"] if not self._same_cell(other, key)]
        cells = [*others, cell | {"runs": runs}]
        self.record["cells"] = sorted(cells, key=lambda c: self.order.index((c["configuration"], c["concurrency"])))
        compare(self.record["cells"], base=self.order[0][0])
        self.write()

    def write(self) -> None:
        _replace(self.path / "run.json", json.dumps(self.record, indent=1) + "\n")

    def traces(self, label: str) -> Path:
        """The directory for a cell's traces; TensorBoard shows each as a run."""
        return self.path / "traces" if len(self.order) == 1 else self.path / "traces" / label

    def save_audio(self, row: RequestRow, sample_rate: int) -> str | None:
        """Writes the kept audio of a request as FLAC, 16 bits; its path relative to the run directory."""
        if not row.audio:
            return None
        file = self.path / "audio" / f"{row.id}.flac"
        file.parent.mkdir(exist_ok=True)
        soundfile.write(file, np.concatenate(row.audio), sample_rate, subtype="PCM_16")
        return str(file.relative_to(self.path))

    def _check_same(self, found: dict[str, Any]) -> None:
        if found["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {found['schema_version']}")
        for name, configuration in self.record["configurations"].items():
            before = found["configurations"].get(name, {}).get("experiment")
            if before != configuration["experiment"]:
                changed = changed_keys(before or {}, configuration["experiment"])
                message = (
                    f"--resume: expected the experiment of {self.path}, but {name} has another {', '.join(changed)}"
                )
                raise ExperimentError(message)

    def _request_lines(self) -> list[dict[str, Any]]:
        file = self.path / "requests.jsonl"
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # the line at which the process was killed
                continue
        return lines

    @staticmethod
    def _key(row: dict[str, Any]) -> Key:
        return row["configuration"], row["concurrency"], row["repeat"]

    @staticmethod
    def _same_cell(cell: dict[str, Any], key: Key) -> bool:
        return (cell["configuration"], cell["concurrency"]) == key[:2]


def request_line(row: RequestRow, sample_rate: int, concurrency: int | None) -> dict[str, Any]:
    """A request as a line of requests.jsonl. Times are in ms since `send_ns`, which is of the machine's clock."""
    figures = dataclasses.asdict(request_figures(row, sample_rate))
    del figures["itl_ms"]
    return {
        "id": row.id,
        "index": row.index,
        "first_wave": concurrency is not None and row.index < concurrency,
        "text": row.text,
        "prompt_tokens": row.prompt_tokens,
        **figures,
        "text_times_ms": _since(row.text_ns, row.sent_ns),
        "text_event_tokens": row.text_tokens,
        "audio_times_ms": _since(row.audio_ns, row.sent_ns),
        "audio_chunk_frames": row.audio_frames,
        "audio_chunk_samples": row.audio_samples,
        "finish_reason": row.reasons or None,
        "error": row.error,
        "send_ns": row.sent_ns,
        **row.labels,
    }


def _since(times_ns: Iterable[int], start_ns: int) -> list[float]:
    return [round((time_ns - start_ns) / 1e6, 3) for time_ns in times_ns]


def _replace(file: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader sees the old file or the new one, never half of one."""
    scratch = file.with_name(f".{file.name}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, file)


def changed_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys in which two experiments differ."""
    changed = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(f"{prefix}{key}")
    return changed
