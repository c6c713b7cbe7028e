"""The rows that a run measures: engine steps, chunks on the edges, and requests as the client saw them.

All times are `time.monotonic_ns()` of one machine, so rows of different processes can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class StepRow:
    """One engine step of one worker.

    The times of the phases (`metrics/phases.py` says what each is) are since the end of the worker's step before:
    prepare, forward and sample make up the step, the others the gap before it. A step inside another one (a stage of a
    model that runs as a whole) has no gap, not even time to schedule.
    `tokens` is what the step gave: sampled text tokens (thinker), codec frames (talker, code2wav);
    prompt tokens of a prefill are not counted, the token that it samples is.
    """

    stage: str
    replica: int
    step: int
    start_ns: int
    end_ns: int
    batch: int
    tokens: int
    kind: str
    idle_ns: int = 0
    input_ns: int = 0
    slot_ns: int = 0
    schedule_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    payload_ns: int = 0
    send_ns: int = 0
    other_ns: int = 0


@dataclass(slots=True)
class ChunkRow:
    """One payload on one edge, such as "thinker->talker" or "code2wav->client"."""

    edge: str
    request: str
    index: int
    frames: int
    bytes: int
    produced_ns: int
    sent_ns: int
    received_ns: int
    final: bool


@dataclass(slots=True)
class RequestRow:
    """One request as the client saw it. `due_ns` is when it should have been sent, `sent_ns` when it was."""

    id: str
    index: int
    due_ns: int
    sent_ns: int = 0
    end_ns: int = 0
    text: str = ""
    prompt_tokens: int | None = None
    text_ns: list[int] = field(default_factory=list)
    text_tokens: list[int] = field(default_factory=list)
    """New tokens of each text event, the stop token included."""
    audio_ns: list[int] = field(default_factory=list)
    audio_samples: list[int] = field(default_factory=list)
    audio_frames: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    audio: list[np.ndarray] = field(default_factory=list)
    """Samples of each chunk, kept only where they are to be saved."""
    codes: list[np.ndarray] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    """What the data set says of the request: its name there, the text to be spoken, the speaker."""
