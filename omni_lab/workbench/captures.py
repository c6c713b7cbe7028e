"""Traces for notebooks: those that ship with the project, or one that is captured now."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from omni_lab.tracing.gaps import trace_files
from omni_lab.workbench.runs import ROOT, Mode, open_run

QUIET = "6"
"""Level above all of torch's profiler, which else writes on stderr whenever it starts and stops."""


def open_traces(mode: Mode = "reference", quick: Iterable[str] = (), path: str | Path | None = None) -> dict[str, Path]:
    """Traces by their name.

    `path`, a trace or a folder of them, comes before all else. `reference`: what lies in results/reference/traces.
    `full` runs experiments/async_output.yaml with torch's profiler, `quick` the same with `quick` laid over it. Raises
    TraceError if there is no trace, and what `open_run` raises.
    """
    if path is not None:
        return {Path(path).name: Path(path)}
    if mode == "reference":
        files = trace_files(ROOT / "results" / "reference" / "traces")
        return {file.name.split(".")[0]: file for file in files}
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    run = open_run("async_output", mode, quick, ["profile.enabled=true"])
    return {"captured here": run.path / "traces"}
