"""What compiles native code on this machine, and where it is kept between runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cache_root() -> Path:
    """`OMNI_LAB_CACHE`, else `omni_lab` in the user's cache directory: graphs, kernels, the compiler's own cache."""
    root = os.environ.get("OMNI_LAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "omni_lab"
    return Path(root).expanduser()


def compiler() -> str | None:
    """The C++ compiler that PyTorch would use, if there is one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)
