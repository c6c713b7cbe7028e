"""The kernels as one shared library: compiled once for this processor and this torch, kept on disk, open for graphs."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from functools import cache
from pathlib import Path

import torch

from omni_lab.kernels.native import cache_root, compiler, processor

SOURCES = sorted([*Path(__file__).parent.glob("*.cpp"), *Path(__file__).parent.glob("*.h")])
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
TUNED = ("-march=native",), ()
"""For this very processor, or where the compiler does not know it, for all of its kind."""


class KernelsMissing(Exception):
    """The kernels cannot be compiled or opened; the message says why."""


@cache
def open_kernels() -> ctypes.CDLL:
    """The library, whose functions every graph that is opened later finds. Raises KernelsMissing."""
    version = "\0".join([torch.__version__, processor(), *FLAGS, sources()])
    library = cache_root() / "kernels" / f"{hashlib.sha256(version.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(library)
    try:
        return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelsMissing(f"{library} cannot be opened ({error}); delete it and it is compiled anew") from error


def sources() -> str:
    """What the kernels are made of."""
    return "".join(source.read_text() for source in SOURCES)


def _compile(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # graphs are compiled by several processes at a time
        if library.exists():
            return
        if compiler() is None:
            raise KernelsMissing("there is no C++ compiler (install g++)")
        partial = library.with_suffix(".partial")
        home = Path(torch.__file__).parent
        files = [source for source in SOURCES if source.suffix == ".cpp"]
        torch_flags = f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu"
        for tuned in TUNED:
            command = [compiler(), *FLAGS, *tuned, *files, *torch_flags, "-o", partial]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                partial.rename(library)
                return
        raise KernelsMissing(f"{compiler()} cannot compile the kernels: {done.stderr.strip()[:300]}")
