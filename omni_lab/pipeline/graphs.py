"""Compiles the graphs that a pipeline lacks, before its workers start: each in a process of its own, side by side."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable

import msgspec

from omni_lab.engine.compiled import graph_file, sizes
from omni_lab.families.graph_cache import compiler, failure_file, graph_folder
from omni_lab.families.plan import StagePlan


def missing_graphs(plans: Iterable[StagePlan]) -> list[tuple[StagePlan, int]]:
    """(plan, batch) of each graph on the CPU that is neither compiled nor known to fail; replicas share theirs.

    Without a C++ compiler nothing is missing: the stages run eager and say why.
    """
    missing = {}
    if compiler() is None:
        return []
    for plan in plans:
        if plan.step == "captured" and plan.device == "cpu" and plan.engine == "torch":
            for size in sizes(plan.rows):
                package = graph_file(graph_folder(plan), plan.stage, size)
                if not package.exists() and not failure_file(package).exists():
                    missing[package] = plan, size
    return list(missing.values())


async def compile_graphs(missing: list[tuple[StagePlan, int]], done: Callable[[], object]) -> None:
    """Compile, the longest first, as many at a time as there are cores. `done` hears of each.

    A graph that cannot be compiled leaves its reason behind, and its stage runs eager.
    """
    slots = asyncio.Semaphore(os.cpu_count() or 1)
    missing = sorted(missing, key=lambda item: (item[0].stage != "talker", -item[1]))

    async def one(plan: StagePlan, size: int) -> None:
        async with slots:
            command = ("-m", "omni_lab.pipeline.compile_graph", msgspec.json.encode(plan).decode(), str(size))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            done()

    async with asyncio.TaskGroup() as tasks:
        for plan, size in missing:
            tasks.create_task(one(plan, size))
