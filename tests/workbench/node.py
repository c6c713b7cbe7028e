"""Node for tests of the widgets' modules: the one that playwright's driver brings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import playwright

NODE = Path(playwright.__file__).parent / "driver" / "node"


def node(*arguments: str | Path, stdin: str = "") -> str:
    """What node writes to stdout. Raises AssertionError with all it wrote if it fails."""
    done = subprocess.run([NODE, *arguments], input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
