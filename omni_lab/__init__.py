"""omni_lab: a workbench for multi-stage omni-modal serving."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_lab.frames import Run


def load(run_dir: Path | str) -> Run:
    """The tables of a run directory as pandas DataFrames: `cells`, `stages`, `requests`, `steps`, `chunks`."""
    from omni_lab import frames  # pandas is large, and a worker process has no use for it

    return frames.load(run_dir)
