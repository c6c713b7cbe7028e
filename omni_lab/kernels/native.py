"""Native code: for which processor, what compiles it here, and where it is kept between runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
from functools import cache
from pathlib import Path

import torch


def cache_root() -> Path:
    """`OMNI_LAB_CACHE`, else `omni_lab` in the user's cache directory: graphs, kernels, the compiler's own cache."""
    root = os.environ.get("OMNI_LAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "omni_lab"
    return Path(root).expanduser()


def compiler() -> str | None:
    """The C++ compiler that PyTorch would use, if there is one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)


@cache
def processor() -> str:
    """What code for this very processor may use: its instruction sets, as far as the system tells."""
    told = Path("/proc/cpuinfo")
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", told.read_text(), re.MULTILINE) if told.exists() else None
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags[1] if flags else ''}"
