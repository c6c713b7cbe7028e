"""Messages and their bytes: a small typed header, then raw tensors. No pickle."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import torch

from omni_lab.core import Payload, Sampling

ALIGNMENT = 16
ZEROS = b"\0" * ALIGNMENT
SMALL = 1024
"""Up to so many bytes a copy is cheaper than a view."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, *INTEGERS)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Admit(msgspec.Struct, tag="admit"):
    """To a stage: a request will come. Sent to every stage of its route before the first payload."""

    request_id: str
    sampling: Sampling
    options: dict[str, Any]
    targets: tuple[str, ...]
    routes: dict[str, int]


class Abort(msgspec.Struct, tag="abort"):
    """To a stage: forget the request."""

    request_id: str


class Finish(msgspec.Struct, tag="finish"):
    """To an autoregressive stage: end the request with the next token, as if it were the end token."""

    request_id: str


class Hold(msgspec.Struct, tag="hold"):
    """To a generation stage: leave the request out of the steps (`held`), or go on with it."""

    request_id: str
    held: bool


class Ping(msgspec.Struct, tag="ping"):
    """To a stage, which sends it back: its loop still turns."""


class TakeRecords(msgspec.Struct, tag="take_records"):
    """To a stage: answer with `Records` of all steps and hand-offs since the last call."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """To a stage: end."""


class Start(msgspec.Struct, tag="start"):
    """To a worker process: its plan as JSON."""

    plan: str


class Ready(msgspec.Struct, tag="ready"):
    """From a stage: loaded; facts about it (rows of the cache, bytes of weights, peak memory).

    From an executor: `lost` payloads came for it before its process was there.
    """

    stage: str
    replica: int
    facts: dict[str, Any]
    lost: int = 0


class Broken(msgspec.Struct, tag="broken"):
    """From a stage: it cannot go on, and why. From an executor: its process has ended, and `lost` payloads with it."""

    stage: str
    replica: int
    error: str
    lost: int = 0


class Records(msgspec.Struct, tag="records"):
    """From a stage: rows of its step clock, rows of received payloads, how many steps were lost.

    Many rows go in several messages; the last one says so.
    """

    stage: str
    replica: int
    steps: list[tuple]
    chunks: list[tuple]
    lost: int
    counters: dict[str, int]
    last: bool = True


class StartCapture(msgspec.Struct, tag="start_capture"):
    """To a stage: after `skip_steps` steps record the next `steps` with the profiler; answered with `Capturing`.

    The trace goes into `directory`. It ends early after `max_s` seconds or about `max_mb` MB of JSON. `base_ns` added
    to monotonic times gives the wall clock's; `shared` says that stages share their process and thread.
    """

    directory: str
    skip_steps: int
    steps: int
    stacks: bool
    memory: bool
    max_mb: float
    max_s: float
    base_ns: int
    shared: bool


class StopCapture(msgspec.Struct, tag="stop_capture"):
    """To a stage: end the capture and write its trace; answered with `Captured`."""


class Capturing(msgspec.Struct, tag="capturing"):
    """From a stage: how far its capture is, or why there is none.

    `state` is "waiting" (for the steps to skip), "recording" or "recorded". `json_bytes` is the size of what is
    recorded: written pieces exactly, the running one as large a step as those; None before the first is written.
    """

    stage: str
    replica: int
    state: str
    steps: int
    json_bytes: int | None = None
    error: str = ""


class Captured(msgspec.Struct, tag="captured"):
    """From a stage: its trace, or in `error` why there is none.

    `bytes` of the file, `json_bytes` before compression. `alignment_us` bounds the error of its times on
    `time.monotonic_ns`; the window is `start_ns` to `end_ns` on that clock. `stopped_by` is what ended it: "steps",
    "max_s", "max_mb" or "stopped".
    """

    stage: str
    replica: int
    path: str = ""
    steps: int = 0
    bytes: int = 0
    json_bytes: int = 0
    alignment_us: float = 0.0
    start_ns: int = 0
    end_ns: int = 0
    stopped_by: str = ""
    error: str = ""


class PayloadHeader(msgspec.Struct, tag="payload"):
    """All of a payload but its bytes; `tensors` lists name, dtype and shape in the order of the bytes."""

    request_id: str
    source: str
    target: str
    index: int
    final: bool
    finish_reason: str | None
    error: str | None
    produced_ns: int
    sent_ns: int
    tensors: list[tuple[str, str, list[int]]]


Control = (
    Admit
    | Abort
    | Finish
    | Hold
    | Ping
    | TakeRecords
    | Shutdown
    | Start
    | Ready
    | Broken
    | Records
    | StartCapture
    | StopCapture
    | Capturing
    | Captured
)
Message = Control | Payload

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control | PayloadHeader)


def encode(message: Message) -> list[bytes | memoryview]:
    """The parts of a message: header length (8 bytes), header padded to ALIGNMENT, then each tensor padded likewise."""
    header, bodies = message, []
    if isinstance(message, Payload):
        tensors = [(name, *on_host(tensor)) for name, tensor in message.tensors.items()]
        header = PayloadHeader(
            message.request_id,
            message.source,
            message.target,
            message.index,
            message.final,
            message.finish_reason,
            message.error,
            message.produced_ns,
            message.sent_ns,
            [(name, dtype, shape) for name, dtype, shape, _ in tensors],
        )
        bodies = [body for _, _, _, body in tensors]
    head = _encoder.encode(header)
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head, ZEROS[: padding(8 + len(head))]]
    for body in bodies:
        parts += [body, ZEROS[: padding(len(body))]]
    return parts


def decode(data: bytearray) -> Message:
    """The message in `data`; tensors are views of it, so the bytes are copied once, by whoever filled `data`."""
    length = int.from_bytes(data[:8], "little")
    header = _decoder.decode(memoryview(data)[8 : 8 + length])
    if not isinstance(header, PayloadHeader):
        return header
    offset = 8 + length + padding(8 + length)
    tensors = {}
    for name, dtype_name, shape in header.tensors:
        dtype = DTYPES[dtype_name]
        count = math.prod(shape)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat if len(shape) == 1 else flat.view(shape)
        size = count * dtype.itemsize
        offset += size + padding(size)
    return Payload(
        header.request_id, header.source, header.target, header.index, header.final, tensors, header.finish_reason,
        header.error, header.produced_ns, header.sent_ns, nbytes=len(data),
    )  # fmt: skip


def on_host(tensor: torch.Tensor) -> tuple[str, list[int], bytes | memoryview]:
    """Name of the dtype, shape and bytes of a tensor; copied only if it lies on a device or in strides."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    body = array.tobytes() if array.nbytes <= SMALL else memoryview(array.reshape(-1).view(np.uint8))
    return NAMES[tensor.dtype], list(array.shape), body


def padding(size: int) -> int:
    return -size % ALIGNMENT
