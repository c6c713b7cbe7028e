"""A worker from its plan."""

from __future__ import annotations

import torch

from omni_lab.engine.clock import StepClock
from omni_lab.engine.output import AsyncOutput, SyncOutput
from omni_lab.engine.scheduler import ContinuousBatching, LeastServedBatching
from omni_lab.engine.worker import Channel, Worker
from omni_lab.families import qwen3_omni
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.handoff import ChunkedHandoff, PrefixHandoff, WholeHandoff
from omni_lab.pipeline.packing import Tensors, as_rows, deserialize, only_new, serialize
from omni_lab.pipeline.remote_stage import RemoteStage

HANDOFFS = {
    ("whole", "new"): (WholeHandoff, as_rows),
    ("whole", "all"): (WholeHandoff, as_rows),  # everything is sent once: there is no prefix to repeat
    ("chunked", "new"): (ChunkedHandoff, as_rows),
    ("chunked", "all"): (PrefixHandoff, only_new),
}
"""Sender's and receiver's part of `handoff` and `prefix`."""

PACKINGS = {"rows": (as_rows, as_rows), "serialized": (serialize, deserialize)}
"""Sender's and receiver's part of `payload`."""


def build_worker(plan: StagePlan, inboxes: dict[str, Channel], outboxes: dict[tuple[str, int], Channel]) -> Worker:
    """Stage, scheduler, hand-off and output path, put together. Loads the stage's weights."""
    torch.set_num_threads(plan.threads)
    clock = StepClock()
    if plan.processes == 2:
        remote = RemoteStage(plan, clock)
        stage, rows, facts, end = remote, remote.facts["rows"], remote.facts, remote.end
    else:
        built = qwen3_omni.build_stage(plan, clock)
        stage, rows, facts, end = built.stage, built.rows, built.facts, lambda: None
    schedulers = {"autoregressive": ContinuousBatching, "generation": LeastServedBatching}
    scheduler = schedulers[plan.kind](stage, rows, plan.step_tokens)
    pack, unpack = PACKINGS[plan.payload]
    handoff_class, take = HANDOFFS[plan.handoff, plan.prefix]
    handoff = handoff_class(plan.stage, plan.chunk_sizes, pack)
    output = {"sync": SyncOutput, "async": AsyncOutput}[plan.output]

    def arrived(tensors: Tensors) -> Tensors:
        return take(unpack(tensors))

    return Worker(
        stage, plan.replica, scheduler, handoff, output, clock, inboxes, outboxes, facts, unpack=arrived, end=end
    )
