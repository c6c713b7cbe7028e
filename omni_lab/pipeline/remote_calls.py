"""What a `RemoteStage` and the process of its network say to each other, over the same channels as the stages.

To the network: `Admit` opens a sequence, a `Payload` is its input, `Abort` closes it; `Move`, `Step` and what a capture
asks travel in a payload of their own. Each `Step` is answered with a `Result`, what a capture asks with `Profiled`,
nothing else.
"""

from __future__ import annotations

import msgspec
import torch

from omni_lab.core import Payload

CALL = "call"
"""Target of a payload that carries a call, and the name of its tensor of msgpack bytes."""


class Move(msgspec.Struct, tag="move"):
    """`Stage.move`: copy one cache row to another."""

    source: int
    target: int


class Step(msgspec.Struct, tag="step"):
    """`Stage.step` for the sequences of `rows` (request id to cache row, in the order of the batch).

    Without a kind no step is taken: the answer says what the input since the last answer has changed.
    """

    kind: str | None
    rows: dict[str, int]


class State(msgspec.Struct, array_like=True):
    """What the scheduler asks of one sequence: its next step, that step's tokens, and whether it has ended."""

    request_id: str
    kind: str | None
    tokens: int
    finished: bool


class Sent(msgspec.Struct, array_like=True):
    """An emission without its tensors."""

    request_id: str
    target: str
    names: list[str]
    final: bool
    reason: str | None


class Result(msgspec.Struct, tag="result"):
    """The answer to a `Step`: the states that have changed and what the step made.

    `blocks` are (name, members, sizes) of each `Block`, whose tensors travel beside the call; `steps` rows of the
    network's own clock; `counters` the stage's and the process's; `rejected` the causes for which the input of a
    sequence could not be taken, by request.
    """

    states: list[State] = []
    tokens: int = 0
    sent: list[Sent] = []
    blocks: list[tuple[str, list[int], list[int] | None]] = []
    steps: list[tuple] = []
    rejected: dict[str, str] = {}
    counters: dict[str, int] = {}
    error: str | None = None


class StartProfiler(msgspec.Struct, tag="start_profiler"):
    """Record with the profiler; answered with `Profiled`. Fields as in `Options` of tracing/profiler.py."""

    directory: str
    stacks: bool
    memory: bool


class StopProfiler(msgspec.Struct, tag="stop_profiler"):
    """Write what was recorded to `path`, if there is one; answered with `Profiled`."""

    path: str | None


class Profiled(msgspec.Struct, tag="profiled"):
    """The answer: clock anchors and bytes written as `LocalProfiler` gives them, or why not."""

    anchors: list[tuple[int, int]] = []
    nbytes: int = 0
    error: str = ""


Call = Move | Step | Result | StartProfiler | StopProfiler | Profiled

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Call)


def to_payload(call: Call, tensors: dict[str, torch.Tensor] | None = None) -> Payload:
    body = bytearray()
    _encoder.encode_into(call, body)
    return Payload("", CALL, CALL, tensors={CALL: torch.frombuffer(body, dtype=torch.uint8)} | (tensors or {}))


def from_payload(payload: Payload) -> Call:
    return _decoder.decode(memoryview(payload.tensors[CALL].numpy()))
