"""Compiles the graphs that a pipeline lacks, before its workers start, in processes of their own, side by side."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from omni_lab.engine.compiled import graph_file
from omni_lab.families import qwen3_omni
from omni_lab.families.graph_cache import failure_file, graph_folder
from omni_lab.families.plan import StagePlan
from omni_lab.kernels.compiler import cache_root, compiler

Job = tuple[StagePlan, str, int]
"""A graph to compile: the plan of its stage, its name, and its smallest batch."""


def missing_graphs(plans: Iterable[StagePlan]) -> list[Job]:
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


async def compile_graphs(missing: list[Job], done: Callable[[], object]) -> None:
    """Compile, the longest first, in as many processes as there are cores. `done` hears of each.

    A graph that cannot be compiled leaves its reason behind, and its stage runs eager.
    """
    jobs = deque(sorted(missing, key=lambda job: (job[0].stage != "talker", -job[2])))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(len(jobs), os.cpu_count() or 1)):
            tasks.create_task(_compile(jobs, done))


async def _compile(jobs: deque[Job], done: Callable[[], object]) -> None:
    """Give a process one job after the other; one that ends over a job is followed by another."""
    process = None
    try:
        while jobs:
            plan, name, size = jobs.popleft()
            if process is None or process.returncode is not None:
                process = await _start()
            process.stdin.write(msgspec.json.encode((plan, name, size)) + b"\n")
            if not await process.stdout.readline():
                await process.wait()
            done()
    finally:
        if process is not None and process.returncode is None:
            process.kill()


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "omni_lab.pipeline.compile_graph",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor")},
    )
