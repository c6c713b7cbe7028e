"""Where a run took place: versions, machine, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from omni_lab.engine.clock import cost_us

PACKAGES = ("omni-lab", "torch", "transformers", "numpy", "msgspec", "pydantic")


def describe_environment() -> dict[str, Any]:
    """Versions, processor, threads, memory, GPUs, git commit, and what the step clock costs a step here.

    What cannot be told is None.
    """
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus_usable": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "step_clock_us": round(cost_us(), 2),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_modified": bool(_git("status", "--porcelain", "--untracked-files=no"))
        if _git("rev-parse", "HEAD")
        else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _git(*command: str) -> str | None:
    """Output of a git command in the package's own folder; None outside of a repository or without git."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
