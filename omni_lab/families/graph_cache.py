"""Where compiled graphs are kept between runs, and why one is missing."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

import torch

from omni_lab.families.plan import StagePlan

PACKAGE = Path(__file__).parent.parent
TRACED = ("engine/compiled.py", "engine/kv_cache.py", "engine/sampler.py", "engine/traced.py")
"""Sources, beside the networks and their steps, that decide what a graph computes."""


def graph_folder(plan: StagePlan) -> Path:
    """The folder of a stage's graphs: another one for every network shape, cache shape, version and kind of CPU.

    Weights are not part of it.
    """
    shape = (plan.stage, plan.rows, plan.max_length, plan.dtype, plan.positions, plan.cache_bytes)
    parts = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        repr(shape),
        (Path(plan.checkpoint) / "config.json").read_text(),
        _sources(),
    ]
    return cache_root() / "graphs" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_root() -> Path:
    """`OMNI_LAB_CACHE`, else `omni_lab` in the user's cache directory: graphs, and the compiler's own cache."""
    root = os.environ.get("OMNI_LAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "omni_lab"
    return Path(root).expanduser()


def failure_file(package: Path) -> Path:
    """Where the reason stands if a graph could not be compiled."""
    return package.with_suffix(".failed")


def why_missing(package: Path) -> str:
    """Why there is no such graph."""
    if failure_file(package).exists():
        return failure_file(package).read_text()
    return "its graph was not compiled" if compiler() else "there is no C++ compiler to compile it with (install g++)"


def compiler() -> str | None:
    """The C++ compiler that PyTorch would use, if there is one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)


@cache
def _sources() -> str:
    files = [*sorted(PACKAGE.glob("models/**/*.py")), *sorted(PACKAGE.glob("families/**/*steps.py"))]
    files += [PACKAGE / name for name in TRACED]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
