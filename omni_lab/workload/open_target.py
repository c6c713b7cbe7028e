"""Starts what an experiment is to be measured on, and stops it again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from omni_lab.assemble import open_pipeline
from omni_lab.experiment import Experiment
from omni_lab.workload.target import PipelineTarget, Target


class Progress(Protocol):
    """Shows that something goes on: a bar of `total` ticks with a title."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[Callable[[], object]]: ...


COMPILING = "compiling captured steps, once"
"""End of the title under which the graphs that a pipeline lacks are compiled."""

Open = Callable[[Experiment, Progress, Path], AbstractAsyncContextManager[Target]]
"""Starts the target of a configuration; its logs and files go to the path."""


@asynccontextmanager
async def open_target(experiment: Experiment, progress: Progress, folder: Path) -> AsyncIterator[Target]:
    """What the experiment's `target` names. Raises PipelineError if it cannot start."""
    async with AsyncExitStack() as stack:
        if experiment.target == "pipeline":
            target: Target = await _pipeline(experiment, progress, stack)
        else:
            target = await _server(experiment, progress, folder, stack)
        yield target


async def _pipeline(experiment: Experiment, progress: Progress, stack: AsyncExitStack) -> PipelineTarget:
    stages = experiment.stages
    reference = stages["thinker"].engine == "transformers"  # all stages in one worker
    workers = stages["thinker"].replicas if reference else sum(stage.replicas for stage in stages.values())

    def compiling(graphs: int) -> AbstractContextManager[Callable[[], object]]:
        return progress(f"{experiment.name}: {COMPILING}", graphs)

    with progress(f"{experiment.name}: loading", workers) as tick:
        opening = open_pipeline(experiment, lambda worker, facts: tick(), compiling)
        return PipelineTarget(await stack.enter_async_context(opening))


async def _server(experiment: Experiment, progress: Progress, folder: Path, stack: AsyncExitStack) -> Target:
    from omni_lab.peers import own_server, vllm_omni
    from omni_lab.workload.http_client import connect

    peer = experiment.target == "vllm-omni"
    server = (vllm_omni if peer else own_server).prepare(experiment, folder / "servers")
    speaker = vllm_omni.default_speaker(experiment) if peer else None
    began = time.monotonic()
    with progress(f"{experiment.name}: starting {server.command[0]}", 1) as tick:
        await stack.enter_async_context(server.running())
        tick()
    start = {"ready_s": time.monotonic() - began}
    target = await stack.enter_async_context(connect(server.url, speaker=speaker))
    target.effective |= {"command": server.command, "environment": server.environment, "start": start}
    return target
