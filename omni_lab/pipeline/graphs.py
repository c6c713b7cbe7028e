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
from omni_lab.kernels.native import cache_root, compiler
from omni_lab.pipeline.compile_graph import ANSWER

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
    """Give a process one job after the other.

    One that ends over its first job had reason to, and the job is dropped; over a later one, another begins with it.
    """
    while jobs:
        process, answered = await _start(), 0
        try:
            while jobs and await _ask(process, job := jobs.popleft()):
                answered += 1
                done()
            if process.returncode is not None:
                if answered:
                    jobs.appendleft(job)
                else:
                    done()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _ask(process: asyncio.subprocess.Process, job: Job) -> bool:
    """Whether the process answers; if not, it has ended."""
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    while line := await process.stdout.readline():
        if line.decode().strip() == ANSWER:
            return True
    await process.wait()
    return False


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
