"""The nouns that every part shares: requests, payloads, events, and the shape of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

CLIENT = "client"
"""Name of the pipeline's outside: the source of prompts and the target of text and audio."""


class RequestError(ValueError):
    """A request that cannot be served as it is; `field` names the part to mend."""

    def __init__(self, message: str, field: str = "request") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class StageError(RuntimeError):
    """A stage failed while it worked on a request; the message names stage, request and cause."""


class PipelineError(RuntimeError):
    """The pipeline itself cannot start or go on (bad checkpoint, dead worker)."""


class Unavailable(PipelineError):
    """No worker of a stage can take the request now; another one may later."""


class DeadlineError(TimeoutError):
    """A request was not finished within the time it was given; the message names request and stages."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one autoregressive stage picks its tokens.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off. The stage stops at
    its end token, but not before `min_tokens` and at the latest after `max_tokens` sampled tokens.
    Draws come from a generator seeded with `seed`, one for each request; None picks a seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int = 256


@dataclass(slots=True)
class Request:
    """What a client asks: a chat, the form of the answer, and the sampling of each stage.

    A message is `{"role": ..., "content": str | [part, ...]}`; a part is `{"type": "text", "text": ...}` or
    `{"type": "audio" | "image" | "video", <type>: path, bytes, data URL or array}` (see `media.py`).
    """

    id: str
    messages: list[dict[str, Any]]
    modalities: tuple[str, ...] = ("text", "audio")
    speaker: str | None = None
    sampling: dict[str, Sampling] = field(default_factory=dict)
    return_codes: bool = False
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts; the speech ends with the text that was handed on by then."""


@dataclass(slots=True)
class Prompt:
    """A request made ready for the first stage: its tensors, and what the stages downstream need.

    `tensors` is the payload to the first stage. `options` holds plain values for single stages, such as
    the talker's speaker id: `{"talker": {"speaker": 2302}}`; `lengths` the prompt's length in each stage that
    keeps a cache.
    """

    tokens: int
    tensors: dict[str, torch.Tensor]
    lengths: dict[str, int] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Payload:
    """One hand-off over one edge: named tensors of one request. Chunks of a request keep their order."""

    request_id: str
    source: str
    target: str
    index: int = 0
    final: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    produced_ns: int = 0
    sent_ns: int = 0
    received_ns: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class TextDelta:
    """Text as it is decoded; `token_ids` are the new tokens, the stop token included."""

    text: str
    token_ids: list[int]
    received_ns: int


@dataclass(slots=True)
class AudioChunk:
    """PCM of `frames` codec frames: float32 in [-1, 1], mono. `codes` [frames, 16] if they were asked for."""

    samples: np.ndarray
    index: int
    frames: int
    final: bool
    produced_ns: int
    sent_ns: int
    received_ns: int
    codes: np.ndarray | None = None


@dataclass(slots=True)
class Finished:
    """The end of an answer: why each modality stopped, as `{"text": "stop", "audio": "length"}`."""

    reasons: dict[str, str]
    prompt_tokens: int
    text: str
    received_ns: int


Event = TextDelta | AudioChunk | Finished


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One room of the pipeline. `kind` says how it is scheduled: "autoregressive" or "generation"."""

    name: str
    kind: str
    modalities: tuple[str, ...] = ()
    """What this stage gives to the client: "text", "audio", both or nothing."""


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """Stages in order and the edges between them, the client's included."""

    stages: tuple[StageSpec, ...]
    edges: tuple[tuple[str, str], ...]

    def stage(self, name: str) -> StageSpec:
        return next(stage for stage in self.stages if stage.name == name)

    def inputs(self, name: str) -> list[str]:
        return [source for source, target in self.edges if target == name]

    def outputs(self, name: str) -> list[str]:
        return [target for source, target in self.edges if source == name]

    def needed(self, modalities: tuple[str, ...]) -> list[str]:
        """Stages that a request for these modalities passes through, in order."""
        wanted = {stage.name for stage in self.stages if set(stage.modalities) & set(modalities)}
        for stage in reversed(self.stages):
            if wanted & set(self.outputs(stage.name)):
                wanted.add(stage.name)
        return [stage.name for stage in self.stages if stage.name in wanted]
