"""A worker from its plan."""

from __future__ import annotations

import torch

from omni_lab.engine.clock import StepClock
from omni_lab.engine.output import AsyncOutput, SyncOutput
from omni_lab.engine.scheduler import ContinuousBatching, LeastServedBatching
from omni_lab.engine.worker import Channel, Worker
from omni_lab.families import qwen3_omni
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.handoff import ChunkedHandoff, WholeHandoff


def build_worker(plan: StagePlan, inboxes: dict[str, Channel], outboxes: dict[tuple[str, int], Channel]) -> Worker:
    """Stage, scheduler, hand-off and output path, put together. Loads the stage's weights."""
    torch.set_num_threads(plan.threads)
    clock = StepClock()
    built = qwen3_omni.build_stage(plan, clock)
    if plan.kind == "autoregressive":
        scheduler = ContinuousBatching(built.stage, built.rows, plan.step_tokens)
    else:
        scheduler = LeastServedBatching(built.stage, built.rows, plan.step_tokens)
    handoff = {"whole": WholeHandoff, "chunked": ChunkedHandoff}[plan.handoff](plan.stage, plan.chunk_sizes)
    output = {"sync": SyncOutput, "async": AsyncOutput}[plan.output]
    return Worker(built.stage, plan.replica, scheduler, handoff, output, clock, inboxes, outboxes, built.facts)
