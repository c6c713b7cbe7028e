"""Compiles the graphs that a pipeline lacks, before its workers start: each in a process of its own, side by side."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable

import msgspec

from omni_lab.engine.compiled import graph_file
from omni_lab.families import qwen3_omni
from omni_lab.families.graph_cache import cache_root, compiler, failure_file, graph_folder
from omni_lab.families.plan import StagePlan


def missing_graphs(plans: Iterable[StagePlan]) -> list[tuple[StagePlan, str, int]]:
    """(plan, name, batch) of each graph on the CPU that is neither compiled nor known to fail; replicas share theirs.

    Without a C++ compiler nothing is missing: the stages run eager and say why.
    """
    missing = {}
    if compiler() is None:
        return []
    for plan in plans:
        if plan.step == "captured" and plan.device == "cpu" and plan.engine == "torch":
            for name, size in qwen3_omni.graph_names(plan):
                package = graph_file(graph_folder(plan), name, size)
                if not package.exists() and not failure_file(package).exists():
                    missing[package] = plan, name, size
    return list(missing.values())


async def compile_graphs(missing: list[tuple[StagePlan, str, int]], done: Callable[[], object]) -> None:
    """Compile, the longest first, as many at a time as there are cores. `done` hears of each.

    A graph that cannot be compiled leaves its reason behind, and its stage runs eager.
    """
    slots = asyncio.Semaphore(os.cpu_count() or 1)
    missing = sorted(missing, key=lambda item: (item[0].stage != "talker", -item[2]))

    async def one(plan: StagePlan, name: str, size: int) -> None:
        async with slots:
            command = ("-m", "omni_lab.pipeline.compile_graph", msgspec.json.encode(plan).decode(), name, str(size))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor")},
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            done()

    async with asyncio.TaskGroup() as tasks:
        for plan, name, size in missing:
            tasks.create_task(one(plan, name, size))
