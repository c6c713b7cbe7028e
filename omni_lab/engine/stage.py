"""What a stage is to its worker: sequences come in, steps are taken, emissions go out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from omni_lab.core import Payload, Sampling


@dataclass(slots=True)
class Filling:
    """A payload that is not complete yet: the rows it has, and its number in its stream."""

    rows: int = 0
    index: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside one stage. `state` belongs to the stage, `row` and `steps` to the scheduler, `filling` (by
    target) to the hand-off.

    `targets` are the outputs this request wants of the stage (other stages, or the client); `routes` the
    replica that serves the request in each stage. A generation stage leaves a `held` one out of its steps; what an
    `aborted` one has emitted and not sent is dropped.
    """

    request_id: str
    sampling: Sampling
    options: dict[str, Any]
    targets: tuple[str, ...]
    routes: dict[str, int]
    state: Any = None
    row: int = -1
    steps: int = 0
    filling: dict[str, Filling] = field(default_factory=dict)
    finished: bool = False
    held: bool = False
    aborted: bool = False


@dataclass(slots=True)
class Emission:
    """What one step made for one target of one sequence: tensors whose first dimension is rows in time.

    `final` ends the stream to this target; `reason` then says why the stage stopped ("stop", "length"). `due` is set by
    the output path: the number of the payload that the emission completes.
    """

    sequence: Sequence
    target: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    final: bool = False
    reason: str | None = None
    due: int | None = None


class Stage(Protocol):
    """The furniture that differs from stage to stage: a network and how its sequences use it.

    `counters` are what it counts beside its steps, by name.
    """

    name: str
    counters: dict[str, int]

    def open(self, sequence: Sequence) -> None:
        """A request was admitted; its input may come later, in parts."""

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        """A part of the sequence's input arrived."""

    def next_step(self, sequence: Sequence) -> str | None:
        """The kind of step the sequence is ready for, or None while it waits for input."""

    def step_tokens(self, sequence: Sequence) -> int:
        """Tokens (or frames) that the sequence's next prefill or generation step works on."""

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        """Take one step for all sequences of the batch; the emissions and the tokens (or frames) processed.

        Sets `finished` on sequences that need no further step. Tells the worker's clock when prepare, forward, sample
        and, with the result on the host, payload begin.
        """

    def move(self, source: int, target: int) -> None:
        """Copy the state of cache row `source` to row `target` (autoregressive stages only)."""

    def close(self, sequence: Sequence) -> None:
        """The sequence ended or was aborted: let go of what it holds."""
