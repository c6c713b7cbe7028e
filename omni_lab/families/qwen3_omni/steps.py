"""The decode steps of Thinker and Talker, eager or captured: the same call, the same result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from omni_lab.engine.compiled import CompiledGraphs, CompiledPrefill, GraphRefused, sizes
from omni_lab.engine.cuda_graph import CudaGraphs
from omni_lab.engine.kv_cache import KVCache
from omni_lab.engine.sampler import ResidualPick
from omni_lab.engine.traced import TracedStep
from omni_lab.families.graph_cache import graph_files
from omni_lab.families.plan import StagePlan
from omni_lab.families.qwen3_omni.prefill_steps import (
    CapturedPrefill,
    EagerPrefill,
    has_prefill_graph,
    traced_prefill,
)
from omni_lab.models.qwen3_omni.invariance import INVARIANT_WINDOW
from omni_lab.models.qwen3_omni.talker import Talker
from omni_lab.models.qwen3_omni.thinker import Thinker

CAPTURED = "captured"
"""The fact about a stage whose graphs are in use; any other text is the reason why they are not."""

RESIDUAL_TOP_K = 50
RESIDUAL_TOP_P = 0.8
"""Filters of the residual codes when the Talker samples: the code predictor's generation defaults in transformers."""


class Graphs(Protocol):
    """Captured forms of one step: `engine/compiled.py` on the CPU, `engine/cuda_graph.py` on CUDA."""

    def width(self, count: int) -> int: ...

    def run(self, end: int, *batch: torch.Tensor) -> list[torch.Tensor] | None: ...


class EagerDecode:
    """One Thinker step, operator by operator."""

    def __init__(self, network: Thinker, cache: KVCache) -> None:
        self.network = network
        self.cache = cache
        self.counters = {"eager_steps": 0}

    def width(self, count: int) -> int:
        """The rows that the tensors of a batch of `count` must have."""
        return count

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, end: int) -> torch.Tensor:
        """Logits [B, V], see `Thinker.decode`."""
        self.counters["eager_steps"] += 1
        return self.network.decode(tokens, positions, lengths, self.cache, end)


class CapturedDecode:
    """One Thinker step as a replay of its graph; a shape without a graph runs eager and is counted."""

    def __init__(self, graphs: Graphs, eager: EagerDecode) -> None:
        self.graphs = graphs
        self.eager = eager
        self.counters = eager.counters
        self.counters["graph_replays"] = 0
        self.width = graphs.width

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, end: int) -> torch.Tensor:
        outputs = self.graphs.run(end, tokens, positions, lengths)
        if outputs is None:
            return self.eager(tokens, positions, lengths, end)
        self.counters["graph_replays"] += 1
        return outputs[0]


class EagerFrame:
    """One Talker frame, operator by operator."""

    def __init__(self, network: Talker, cache: KVCache) -> None:
        self.network = network
        self.cache = cache
        self.counters = {"eager_steps": 0}

    def width(self, count: int) -> int:
        """The rows that the tensors of a batch of `count` must have."""
        return count

    def __call__(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        end: int,
        pick: ResidualPick,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [B, 16], hidden states [B, H] and logits [B, V], see `Talker.frame`."""
        self.counters["eager_steps"] += 1
        return self.network.frame(hidden, tokens, text, positions, lengths, self.cache, end, pick)


class CapturedFrame:
    """One Talker frame, its fifteen residual codes included, as a replay of one graph.

    The draws of a frame take a sixth of it, so a batch in which all rows are greedy has a graph without them.
    """

    def __init__(self, drawn: Graphs, greedy: Graphs, eager: EagerFrame) -> None:
        self.drawn = drawn
        self.greedy = greedy
        self.eager = eager
        self.counters = eager.counters
        self.counters["graph_replays"] = 0
        self.width = drawn.width

    def __call__(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        end: int,
        pick: ResidualPick,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = hidden, tokens, text, positions, lengths
        if pick.uniforms is None:
            outputs = self.greedy.run(end, *batch)
        else:
            outputs = self.drawn.run(end, *batch, *pick.tensors())
        if outputs is None:
            return self.eager(hidden, tokens, text, positions, lengths, end, pick)
        self.counters["graph_replays"] += 1
        codes, hidden, logits = outputs
        return codes, hidden, logits


def choose_step(
    plan: StagePlan,
    eager: EagerDecode | EagerFrame,
    captured: type[CapturedDecode | CapturedFrame],
    prefill: EagerPrefill,
    rows: int,
) -> tuple[EagerDecode | EagerFrame | CapturedDecode | CapturedFrame, EagerPrefill | CapturedPrefill, dict[str, str]]:
    """The step and the prefill that a plan asks for, and facts for the record: if they are captured, or why not."""
    if plan.step == "eager":
        return eager, prefill, {}
    try:
        steps = [trace(eager.network, eager.cache, rows) for trace in TRACES[plan.stage].values()]
        graphs = [CudaGraphs(step) if plan.device.startswith("cuda") else open_graphs(plan, step) for step in steps]
    except GraphRefused as refused:
        return eager, prefill, {"graphs": str(refused)}
    facts = {"graphs": CAPTURED}
    if has_prefill_graph(plan):
        traced = traced_prefill(plan.stage, prefill, rows)
        try:
            graph = CompiledPrefill(traced, graph_files(plan, traced.name, [1]))
            prefill = CapturedPrefill(graph, prefill, eager.counters)
        except GraphRefused as refused:
            facts["prefill_graph"] = str(refused)
    return captured(*graphs, eager), prefill, facts


def open_graphs(plan: StagePlan, traced: TracedStep) -> CompiledGraphs:
    """The compiled graphs of a plan. Raises GraphRefused if there are none, with the reason."""
    return CompiledGraphs(traced, graph_files(plan, traced.name, sizes(traced.rows)))


def traced_decode(network: Thinker, cache: KVCache, rows: int) -> TracedStep:
    """The Thinker's decode step for capture, for at most `rows` rows."""
    axes = network.decoder.rotation.axes

    def function(
        parts: tuple[Thinker, KVCache],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        window: torch.Tensor,
        *lines: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        network, cache = parts
        return (network.decode(tokens, positions, lengths, cache.over(lines), window.shape[0]),)

    def example(count: int) -> tuple[torch.Tensor, ...]:
        return _tokens(network.embedding, count), *_places(cache, count, axes)

    return _traced("thinker", (network, cache.over(())), function, example, cache.lines, cache, rows)


def traced_frame(network: Talker, cache: KVCache, rows: int, draws: bool = True) -> TracedStep:
    """The Talker's frame for capture, for at most `rows` rows: greedy ones and ones that draw, or greedy ones alone."""

    def function(
        parts: tuple[Talker, KVCache],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        network, cache = parts
        uniforms, greedy, window, *lines = others if draws else (None, None, *others)
        pick = ResidualPick(RESIDUAL_TOP_K, RESIDUAL_TOP_P, uniforms, greedy)
        return network.frame(hidden, tokens, text, positions, lengths, cache.over(lines), window.shape[0], pick)

    def example(count: int) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(0)
        size, groups, head = network.config.text.hidden_size, network.config.code_groups, network.head
        hidden, text = torch.randn(2, count, size, generator=draw).to(head)
        batch = hidden, _tokens(head, count), text, *_places(cache, count, network.decoder.rotation.axes)
        if not draws:
            return batch
        uniforms = torch.rand(count, groups, generator=draw, dtype=torch.float64).to(head.device)
        return *batch, uniforms, torch.arange(count, device=head.device) % 2 == 0

    name = "talker" if draws else "talker_greedy"
    return _traced(name, (network, cache.over(())), function, example, cache.lines, cache, rows)


TRACES = {
    "thinker": {"thinker": traced_decode},
    "talker": {"talker": traced_frame, "talker_greedy": partial(traced_frame, draws=False)},
}
"""The steps that are captured of each stage, by the names of their graphs, in the order in which the captured step
takes them."""


def _traced(
    name: str,
    network: Any,
    function: Callable,
    example: Callable,
    memory: list[torch.Tensor],
    cache: KVCache,
    rows: int,
) -> TracedStep:
    positions = (cache.shape[2] - 1) // INVARIANT_WINDOW * INVARIANT_WINDOW
    return TracedStep(name, network, function, example, memory, rows, positions, INVARIANT_WINDOW)


def _tokens(table: torch.Tensor, count: int) -> torch.Tensor:
    return torch.arange(count, device=table.device)


def _places(cache: KVCache, count: int, axes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and lengths of rows whose cache is empty but for zeros."""
    device = cache.first_lines.device
    return torch.full((count, *axes), 7.0, device=device), torch.full((count,), 7, device=device)
