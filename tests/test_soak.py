"""The short form of `make soak`: clients leave and workers are killed, and nothing else changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.pipelines import experiment
from tests.soak import SHORT, Trouble, soak


def test_trouble_changes_no_other_answer_and_leaves_nothing_behind(nano: Path) -> None:
    # so few requests have not touched all the memory yet that later ones use again
    trouble = Trouble(requests=120, concurrency=16, kills=2, warmup=24, growth=0.2)
    report, problems = asyncio.run(soak(experiment(nano, *SHORT), trouble))
    assert not problems
    assert report.answered > 60 and report.aborted > 10 and len(report.killed) == 2
