"""The passes of the vocoder, eager or captured: the same call, the same result.

Compiled for a CPU a pass of the embedded checkpoint takes 0.22 (one row, four frames) to 0.39 (eight rows, 25 frames)
of the eager one's time: its activations and convolutions are kernels (`kernels/vocoder.cpp`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_lab.engine.compiled import CompiledPass, GraphRefused
from omni_lab.engine.cuda_graph import CudaPasses
from omni_lab.engine.traced import TracedPass
from omni_lab.families.graph_cache import graph_files
from omni_lab.families.plan import StagePlan
from omni_lab.families.qwen3_omni.steps import CAPTURED
from omni_lab.models.qwen3_omni.code2wav import Code2Wav

BEGIN, GO_ON = "code2wav_begin", "code2wav_go_on"
"""The two passes: over the first frames of streams, and over frames behind what the streams remember."""

LONGEST_PASS = 4096
"""Frames of the longest pass that a compiled graph takes; a longer one runs eager."""


class PassGraphs(Protocol):
    """Captured forms of one pass: `engine/compiled.py` on the CPU, `engine/cuda_graph.py` on CUDA."""

    def shape(self, rows: int, frames: int) -> tuple[int, int] | None: ...

    def run(self, *batch: Tensor) -> list[Tensor] | tuple[Tensor, ...]: ...


class EagerPass:
    """One pass of the vocoder, operator by operator."""

    def __init__(self, network: Code2Wav) -> None:
        self.network = network
        self.counters = {"eager_steps": 0}

    def __call__(
        self, codes: Tensor, starts: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """New samples and what to remember, see `Code2Wav.stream`."""
        self.counters["eager_steps"] += 1
        return self.network.stream(codes, starts, memory, lengths)


class CapturedPass:
    """One pass as a replay of its graph; a shape without a graph runs eager and is counted.

    `graphs` are those of BEGIN and, for a vocoder with a memory, GO_ON. Rows and frames are filled up to the graph's
    shape: frames on the right reach no sample in front of them, and each row remembers the steps at its own end.
    """

    def __init__(self, graphs: dict[str, PassGraphs], eager: EagerPass) -> None:
        self.graphs = graphs
        self.eager = eager
        self.counters = eager.counters
        self.counters["graph_replays"] = 0

    def __call__(
        self, codes: Tensor, starts: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `EagerPass`; the next call may overwrite what this one gave."""
        count, _, frames = codes.shape
        graphs = self.graphs[BEGIN if memory is None else GO_ON]
        shape = graphs.shape(count, frames)
        if shape is None:
            return self.eager(codes, starts, memory, lengths)
        self.counters["graph_replays"] += 1
        rows, more = shape[0] - count, shape[1] - frames
        lengths = torch.full_like(starts, frames) if lengths is None else lengths
        batch = [F.pad(codes, (0, more, 0, 0, 0, rows)), F.pad(starts, (0, rows)), F.pad(lengths, (0, rows), value=1)]
        if memory is not None:
            batch.append(F.pad(memory, (0, 0, 0, rows)))
        samples, memory = graphs.run(*batch)
        return samples[:count, : samples.shape[1] - more * self.eager.network.samples_per_frame], memory[:count]


def choose_pass(plan: StagePlan, network: Code2Wav) -> tuple[EagerPass | CapturedPass, dict[str, str]]:
    """The pass that a plan asks for, and a fact for the record: whether it is captured, or why it is not."""
    eager = EagerPass(network)
    if plan.step == "eager":
        return eager, {}
    try:
        graphs = {name: _open(plan, traced_pass(network, plan.rows, name)) for name in pass_names(plan)}
    except GraphRefused as refused:
        return eager, {"graphs": str(refused)}
    return CapturedPass(graphs, eager), {"graphs": CAPTURED}


def pass_names(plan: StagePlan) -> list[str]:
    """The passes that a plan's vocoder makes: without a memory every decode begins anew."""
    return [BEGIN, GO_ON] if plan.vocoder == "stateful" else [BEGIN]


def traced_pass(network: Code2Wav, rows: int, name: str) -> TracedPass:
    """The pass BEGIN or GO_ON for capture, for at most `rows` rows."""

    def function(
        network: Code2Wav, codes: Tensor, starts: Tensor, lengths: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return network.stream(codes, starts, memory, lengths)

    def example(count: int, frames: int) -> tuple[Tensor, ...]:
        config = network.config
        draw = torch.Generator().manual_seed(0)
        codes = torch.randint(0, config.codebook_size, (count, config.quantizers, frames), generator=draw)
        codes = codes.to(network.code_embedding.weight.device)
        lengths = frames - torch.arange(count, device=codes.device) % frames
        starts = torch.zeros_like(lengths)
        if name == BEGIN:
            return codes, starts, lengths
        return codes, lengths.clone(), lengths, network.stream(codes, starts, None, lengths)[1]

    return TracedPass(name, network, function, example, rows, LONGEST_PASS)


def _open(plan: StagePlan, traced: TracedPass) -> PassGraphs:
    """The graphs of a pass on the plan's device. Raises GraphRefused if there are none, with the reason."""
    if plan.device.startswith("cuda"):
        return CudaPasses(traced)
    return CompiledPass(traced, graph_files(plan, traced.name, [1]))
