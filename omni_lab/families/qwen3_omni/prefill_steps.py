"""The prefill of Thinker and Talker, eager or captured: the same call, the same result.

Eager it is bound by operator calls: a prompt of 31 tokens of the embedded checkpoint takes 2.8 ms for half a
millisecond of arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_lab.engine.compiled import CompiledPrefill
from omni_lab.engine.kv_cache import KVCache
from omni_lab.engine.traced import TracedPrefill
from omni_lab.families.plan import StagePlan
from omni_lab.models.qwen3_omni.invariance import INVARIANT_ROWS
from omni_lab.models.qwen3_omni.spans import PackedSpans, PiecewiseSpans, Span
from omni_lab.models.qwen3_omni.talker import Talker
from omni_lab.models.qwen3_omni.thinker import Thinker

LONGEST_PREFILL = 1 << 15
"""Tokens of the longest prefill that a compiled graph takes; a longer one runs eager."""

PER_PROMPT = {"thinker": 1, "talker": 2}
"""How many outputs of a prefill have a row for each prompt; those behind them have one for each token."""


class EagerPrefill:
    """One prefill of packed prompts, operator by operator. `options` go to the network's `prefill` every time."""

    def __init__(self, network: Thinker | Talker, cache: KVCache, **options: Any) -> None:
        self.network = network
        self.cache = cache
        self.options = options

    def __call__(self, embeds: Tensor, positions: Tensor, spans: list[Span], **media: Any) -> tuple[Tensor, ...]:
        """What the network's `prefill` gives for prompts [N, H] at positions [3, N]."""
        pieces = PiecewiseSpans(spans, embeds.device)
        return self.network.prefill(embeds, positions, pieces, self.cache, **self.options, **media)


class CapturedPrefill:
    """One prefill as a replay of its graph; one with images or videos, or above LONGEST_PREFILL, runs eager.

    Both are counted in `counters`, those of the stage.
    """

    def __init__(self, graph: CompiledPrefill, eager: EagerPrefill, counters: dict[str, int]) -> None:
        self.graph = graph
        self.eager = eager
        self.counters = counters
        self.counters |= {"captured_prefills": 0, "eager_prefills": 0}

    def __call__(self, embeds: Tensor, positions: Tensor, spans: list[Span], **media: Any) -> tuple[Tensor, ...]:
        """As `EagerPrefill`."""
        if any(value is not None for value in media.values()) or len(embeds) > LONGEST_PREFILL:
            self.counters["eager_prefills"] += 1
            return self.eager(embeds, positions, spans, **media)
        self.counters["captured_prefills"] += 1
        return tuple(self.graph.run(embeds, positions.float().contiguous(), *packing(spans)))


def has_prefill_graph(plan: StagePlan) -> bool:
    """Whether a plan's prefill is captured: its attention is a kernel, and that is for float32 on a CPU."""
    return plan.device == "cpu" and plan.dtype == "float32"


def prefill_name(stage: str) -> str:
    return f"{stage}_prefill"


def packing(spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """Where each token's prompt begins [N], its cache row [N], and each prompt's last token [S]."""
    starts, rows, lengths = torch.tensor([(start, row, stop - start) for row, start, stop in spans]).unbind(1)
    return starts.repeat_interleave(lengths), rows.repeat_interleave(lengths), starts + lengths - 1


def traced_prefill(stage: str, eager: EagerPrefill, rows: int) -> TracedPrefill:
    """The prefill of a stage for capture, for at most `rows` prompts."""
    cache, options = eager.cache, eager.options

    def function(
        parts: tuple[Thinker | Talker, KVCache],
        embeds: Tensor,
        positions: Tensor,
        starts: Tensor,
        cache_rows: Tensor,
        last: Tensor,
        *lines: Tensor,
    ) -> tuple[Tensor, ...]:
        network, cache = parts
        filled = torch.cat((last, last[:1].expand(INVARIANT_ROWS - 1)))  # so that one prompt is no special case
        spans = PackedSpans(starts, cache_rows, filled)
        outputs = network.prefill(embeds, positions, spans, cache.over(lines), **options)
        own = PER_PROMPT[stage]
        return *(output[: last.shape[0]] for output in outputs[:own]), *outputs[own:]

    def prompts(lengths: list[int]) -> tuple[Tensor, Tensor, list[Span]]:
        draw = torch.Generator().manual_seed(0)
        spans, start = [], 0
        for row, length in enumerate(lengths):
            spans.append((row, start, start + length))
            start += length
        embeds = torch.randn(start, eager.network.decoder.config.hidden_size, generator=draw)
        positions = torch.cat([torch.arange(length) for length in lengths]).float()
        return embeds, positions.expand(3, -1).contiguous(), spans

    def example(lengths: list[int]) -> tuple[Tensor, ...]:
        embeds, positions, spans = prompts(lengths)
        return embeds, positions, *packing(spans)

    def written(lengths: list[int]) -> list[Tensor]:
        layers = range(len(cache.lines))
        rows = [(cache.row(layer, row), length) for layer in layers for row, length in enumerate(lengths)]
        return [part[:, :length].clone() for parts, length in rows for part in parts]

    return TracedPrefill(
        name=prefill_name(stage),
        network=(eager.network, cache.over(())),
        function=function,
        example=example,
        eager=lambda lengths: eager(*prompts(lengths)),
        written=written,
        memory=cache.lines,
        rows=rows,
        tokens=LONGEST_PREFILL,
    )
