"""How the tensors of a hand-off travel between two stages: as rows or as one serialized blob, new rows or all."""

from __future__ import annotations

import msgspec
import torch

from omni_lab.connectors.wire import DTYPES, on_host

Tensors = dict[str, torch.Tensor]

BLOB = "blob"
"""Name of the only tensor, bytes [n], of a serialized payload."""

NEW_ROWS = "new_rows"
"""In a payload that repeats its stream: for each other tensor in order how many of its last rows are new [names].

-1: the tensor as such is not new. (0 is a new tensor without rows.)
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, tuple[str, list[int], bytearray]])


def as_rows(tensors: Tensors) -> Tensors:
    """As they are: the connector writes each tensor's bytes behind a small header, and reads views of them."""
    return tensors


def serialize(tensors: Tensors) -> Tensors:
    """All tensors as one blob of bytes: a msgpack map from names to (dtype, shape, bytes)."""
    blob = bytearray()
    _encoder.encode_into({name: on_host(tensor) for name, tensor in tensors.items()}, blob)
    return {BLOB: torch.frombuffer(blob, dtype=torch.uint8)}


def deserialize(tensors: Tensors) -> Tensors:
    """The tensors that `serialize` put into a blob, each a copy of its own."""
    fields = _decoder.decode(memoryview(tensors[BLOB].numpy()))
    return {name: _tensor(*field) for name, field in fields.items()}


def mark_new(stream: Tensors, new: Tensors) -> Tensors:
    """All rows of a stream so far, with a note which of them are the rows of `new`."""
    counts = [len(new[name]) if name in new else -1 for name in stream]
    return stream | {NEW_ROWS: torch.tensor(counts, dtype=torch.int64)}


def only_new(tensors: Tensors) -> Tensors:
    """What `mark_new` was given as new, as views."""
    *names, _ = tensors
    counts = tensors[NEW_ROWS].tolist()
    return {
        name: tensors[name][len(tensors[name]) - count :]
        for name, count in zip(names, counts, strict=True)
        if count >= 0
    }


def _tensor(dtype: str, shape: list[int], body: bytearray) -> torch.Tensor:
    if not body:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(body, dtype=DTYPES[dtype]).view(shape)
