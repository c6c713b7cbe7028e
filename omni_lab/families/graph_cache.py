"""Where compiled graphs are kept between runs, and why one is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from omni_lab.engine.compiled import GraphRefused, graph_file
from omni_lab.families.plan import StagePlan
from omni_lab.kernels.library import KernelsMissing, open_kernels, sources
from omni_lab.kernels.native import cache_root, compiler, processor

PACKAGE = Path(__file__).parent.parent
TRACED = ("engine/compiled.py", "engine/kv_cache.py", "engine/sampler.py", "engine/traced.py", "kernels/ops.py")
"""Sources, beside the networks and their steps, that decide what a graph computes."""


def graph_folder(plan: StagePlan) -> Path:
    """The folder of a stage's graphs: another one for every network shape, cache shape, version and kind of CPU.

    Weights are not part of it.
    """
    shape = (plan.stage, plan.rows, plan.max_length, plan.dtype, plan.positions, plan.cache_bytes)
    parts = [
        torch.__version__,
        processor(),
        repr(shape),
        (Path(plan.checkpoint) / "config.json").read_text(),
        _sources(),
    ]
    return cache_root() / "graphs" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def graph_files(plan: StagePlan, name: str, sizes: Iterable[int]) -> Path:
    """The folder in which the graphs of a step are. Raises GraphRefused if one is missing, with the reason."""
    folder = graph_folder(plan)
    for size in sizes:
        package = graph_file(folder, name, size)
        if not package.exists():
            raise GraphRefused(why_missing(package))
    return folder


def failure_file(package: Path) -> Path:
    """Where the reason stands if a graph could not be compiled."""
    return package.with_suffix(".failed")


def why_missing(package: Path) -> str:
    """Why there is no such graph."""
    if failure_file(package).exists():
        return failure_file(package).read_text()
    if compiler() is None:
        return "there is no C++ compiler to compile it with (install g++)"
    try:
        open_kernels()
    except KernelsMissing as error:
        return str(error)
    return "its graph was not compiled"


@cache
def _sources() -> str:
    files = [*sorted(PACKAGE.glob("models/**/*.py")), *sorted(PACKAGE.glob("families/**/*steps.py"))]
    files += [PACKAGE / name for name in TRACED]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + sources().encode()).hexdigest()
