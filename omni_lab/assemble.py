"""Toggles -> parts: the only place that turns `optimizations` into parts. Experiment in, assembled pipeline out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

from omni_lab import zoo
from omni_lab.core import CLIENT, StageSpec
from omni_lab.experiment import Experiment
from omni_lab.families import qwen3_omni
from omni_lab.families.plan import StagePlan
from omni_lab.families.qwen3_omni.steps import CAPTURED
from omni_lab.models.qwen3_omni.prompt import FrontEnd
from omni_lab.pipeline.graphs import compile_graphs, missing_graphs
from omni_lab.pipeline.handoff import chunk_sizes
from omni_lab.pipeline.inline import InlineExecutor
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.pipeline.process import ProcessExecutor
from omni_lab.pipeline.wiring import End
from omni_lab.settings import StageConfig

THREADS = 1
"""Threads of a worker's operators on the CPU: small steps lose more to a second thread than they win."""

STEP_TOKENS = {"autoregressive": 4096, "generation": 128}
"""Prompt tokens of one prefill step, and codec frames (context that is decoded again included) of one vocoder step:
about 0.3 s on a CPU."""


@asynccontextmanager
async def open_pipeline(
    experiment: Experiment,
    progress: Callable[[str, dict], None] = lambda worker, facts: None,
    compiling: Callable[[int], AbstractContextManager[Callable[[], object]]] = lambda count: nullcontext(lambda: None),
) -> AsyncIterator[Pipeline]:
    """The pipeline of an experiment, running; it is closed, with all its processes, when the block ends.

    Graphs that are not compiled yet are compiled first: `compiling` opens a progress display for so many of them.
    `progress` hears the name of every worker that became ready and facts about it. Raises PipelineError if a
    worker cannot start, with the worker and the cause.
    """
    checkpoint = zoo.resolve(experiment.model.checkpoint)
    reference = all(stage.engine == "transformers" for stage in experiment.stages.values())
    spec = qwen3_omni.REFERENCE if reference else qwen3_omni.STAGED
    replicas = {stage.name: stage_config(experiment, stage).replicas for stage in spec.stages}
    plans = {
        End(stage.name, replica): plan_stage(experiment, str(checkpoint), stage, replica)
        for stage in spec.stages
        for replica in range(replicas[stage.name])
    }
    facts: dict[str, dict] = {}

    def ready(worker: str, told: dict) -> None:
        facts[worker] = told
        progress(worker, told)

    if experiment.executor == "inline":
        executor = InlineExecutor(spec, replicas, plans, experiment.connector, ready)
    else:
        executor = ProcessExecutor(spec, replicas, plans, ready)
    max_lengths = {name: stage.max_model_len for name, stage in experiment.stages.items()}
    pipeline = Pipeline(
        spec,
        replicas,
        max_lengths,
        prompt_limit=max_lengths["thinker"],
        front_end=FrontEnd(checkpoint),
        executor=executor,
    )
    began = time.monotonic()
    if missing := missing_graphs(plans.values()):
        with compiling(len(missing)) as done:
            await compile_graphs(missing, done)
    compiled = time.monotonic()
    try:
        await pipeline.start()
        start = {"ready_s": time.monotonic() - began, "compile_s": compiled - began, "compiled_graphs": len(missing)}
        pipeline.effective = effective(experiment, plans, facts) | {"start": start}
        yield pipeline
    finally:
        await pipeline.close()


def plan_stage(experiment: Experiment, checkpoint: str, stage: StageSpec, replica: int) -> StagePlan:
    """What one replica of one stage is made of."""
    toggles, chunking = experiment.optimizations, experiment.chunking
    hot_path = toggles.hot_path
    config = stage_config(experiment, stage)
    sizes = {
        "thinker": dict.fromkeys(("talker", CLIENT), tuple(chunking.text_tokens)),
        "talker": {"code2wav": chunk_sizes(chunking.initial_frames, chunking.frames, chunking.ramp)},
    }
    device = config.device
    return StagePlan(
        checkpoint=checkpoint,
        stage=stage.name,
        replica=replica,
        kind=stage.kind,
        device=device,
        dtype=resolve_dtype(experiment.model.dtype, device),
        rows=config.max_num_seqs if toggles.batching else 1,
        max_length=config.max_model_len,
        step_tokens=STEP_TOKENS[stage.kind],
        cache_bytes=config.kv_cache_bytes,
        handoff="chunked" if toggles.async_chunk else "whole",
        chunk_sizes=sizes.get(stage.name, {}),
        left_context=chunking.left_context,
        output="async" if toggles.async_output else "sync",
        threads=THREADS,
        engine=config.engine,
        step="captured" if toggles.graphs.get(stage.name) and not uncapturable(experiment, stage.name) else "eager",
        state="resident" if hot_path.resident_state else "host",
        positions="linear" if hot_path.linear_positions else "multimodal",
        predictor="cached" if hot_path.code_predictor else "generate",
        vocoder="stateful" if toggles.stateful_code2wav else "context",
        prefix="new" if hot_path.decode_only_handoff else "all",
        payload="rows" if hot_path.row_payloads else "serialized",
        processes=1 if hot_path.single_process_executor else 2,
    )


def stage_config(experiment: Experiment, stage: StageSpec) -> StageConfig:
    """The settings of a stage; of transformers' one worker, which is all stages, the thinker's."""
    return experiment.stages.get(stage.name, experiment.stages["thinker"])


def resolve_dtype(dtype: str, device: str) -> str:
    """ "auto" is float32 on the CPU, where it is exact and fast, and bfloat16 on an accelerator."""
    if dtype == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    return dtype


def uncapturable(experiment: Experiment, stage: str) -> str | None:
    """Why the step of a stage cannot be captured whatever the machine, if it cannot."""
    if stage == "talker" and not experiment.optimizations.hot_path.code_predictor:
        return "transformers' generate, one for each frame, cannot be captured; the step runs eager"
    return None


def effective(experiment: Experiment, plans: dict[End, StagePlan], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The optimizations in effect, and why one that was asked for is not."""
    toggles = experiment.optimizations.model_dump()
    notes = {}
    for end in plans:
        told = facts.get(str(end), {}).get("graphs", CAPTURED)
        refused = uncapturable(experiment, end.stage) or (None if told == CAPTURED else f"{told}; the step runs eager")
        if toggles["graphs"].get(end.stage) and refused:
            toggles["graphs"][end.stage] = False
            notes[f"graphs.{end.stage}"] = refused
        elif told := facts.get(str(end), {}).get("prefill_graph"):
            notes[f"graphs.{end.stage}"] = f"{told}; the prefill alone runs eager"
    if not toggles["async_chunk"] and not toggles["hot_path"]["decode_only_handoff"]:
        notes["hot_path.decode_only_handoff"] = "false changes nothing: without async_chunk everything is sent once"
    return {"optimizations": toggles, "notes": notes}
