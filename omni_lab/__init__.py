"""omni_lab: a workbench for multi-stage omni-modal serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from omni_lab.comparison import Runs
    from omni_lab.frames import Run


def load(run_dir: Path | str) -> Run:
    """The tables of a run directory as pandas DataFrames: `cells`, `stages`, `requests`, `steps`, `chunks`."""
    from omni_lab import frames  # pandas is large, and a worker process has no use for it

    return frames.load(run_dir)


def compare(runs: Runs, base: str | None = None, concurrency: int | Sequence[int] | None = None) -> pd.DataFrame:
    """The configurations of runs (or run directories) side by side: each figure's ratio to `base`, its 95 % interval,
    and a plain word such as "higher" or "within noise". The columns are explained in `omni_lab.comparison.compare`.
    """
    from omni_lab import comparison

    return comparison.compare(runs, base, concurrency)
