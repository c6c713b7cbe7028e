"""The plan of one worker: which parts it is made of, as plain values that travel to its process."""

from __future__ import annotations

import msgspec


class StagePlan(msgspec.Struct, frozen=True):
    """Everything that one replica of one stage needs to know, all toggles already turned into parts.

    `handoff` is "whole" or "chunked" with `chunk_sizes` in rows by target; `output` is "sync" or "async"; `rows`
    the largest batch (1: no batching), `max_length` the positions of one sequence in the cache, and `step_tokens` the
    most prompt tokens, or frames to decode, of one step.

    The rest are pieces by name: `engine` "torch", "transformers" or "vllm"; `step` "eager" or "captured"; `state`
    "resident" on the device or "host"; `positions` "linear" or "multimodal"; `predictor` "cached" or "generate";
    `vocoder` "context" (decodes left context again) or "stateful"; `prefix` "new" (rows not yet sent) or "all";
    `payload` "rows" or "serialized"; `processes` 1, or 2 with the network in a process of its own.
    """

    checkpoint: str
    stage: str
    replica: int
    kind: str
    device: str
    dtype: str
    rows: int
    max_length: int
    step_tokens: int
    cache_bytes: int
    handoff: str
    chunk_sizes: dict[str, tuple[int, ...]]
    left_context: int
    output: str
    threads: int
    engine: str = "torch"
    step: str = "eager"
    state: str = "resident"
    positions: str = "linear"
    predictor: str = "cached"
    vocoder: str = "context"
    prefix: str = "new"
    payload: str = "rows"
    processes: int = 1
