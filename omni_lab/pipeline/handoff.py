"""Hand-off policies: when the rows that a stage emits become a payload for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import torch

from omni_lab.core import CLIENT, Payload
from omni_lab.engine.stage import Emission, Filling
from omni_lab.pipeline.packing import Tensors, as_rows, mark_new


@dataclass(slots=True)
class Stream:
    """What one request has emitted to one target and not yet handed over; `sent` is kept by who sends it again."""

    pending: list[Tensors] = field(default_factory=list)
    sent: Tensors = field(default_factory=dict)


class ChunkedHandoff:
    """Rows go over as they come, in chunks whose k-th size is `sizes(target)[k]`; the last size repeats.

    A target without sizes gets every emission at once. `pack` is how the tensors of a payload travel to
    another stage (see packing.py).
    """

    def __init__(
        self, source: str, sizes: dict[str, tuple[int, ...]], pack: Callable[[Tensors], Tensors] = as_rows
    ) -> None:
        self.source = source
        self.sizes = sizes
        self.pack = pack
        self.streams: dict[tuple[str, str], Stream] = {}

    def count(self, emission: Emission) -> int | None:
        """Count the rows of an emission; the number of the payload that it completes, if it does."""
        filling = emission.sequence.filling.get(emission.target)
        if filling is None:
            filling = emission.sequence.filling[emission.target] = Filling()
        for tensor in emission.tensors.values():
            if tensor.ndim:
                filling.rows += tensor.shape[0]
                break
        if not emission.final and filling.rows < self._size(emission, filling.index):
            return None
        filling.rows = 0
        filling.index += 1
        return filling.index - 1

    def push(self, emission: Emission, produced_ns: int) -> Payload | None:
        """Add a counted emission; the payload if one is due, or None while the chunk is still filling."""
        key = (emission.sequence.request_id, emission.target)
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = Stream()
        if emission.due is None:
            stream.pending.append(emission.tensors)
            return None
        tensors = merge([*stream.pending, emission.tensors]) if stream.pending else emission.tensors
        if emission.target != CLIENT:
            tensors = self.pack(self._content(stream, tensors))
        payload = Payload(
            emission.sequence.request_id,
            self.source,
            emission.target,
            emission.due,
            emission.final,
            tensors,
            emission.reason,
            produced_ns=produced_ns,
        )
        if emission.final:
            del self.streams[key]
        else:
            stream.pending.clear()
        return payload

    def drop(self, request_id: str) -> None:
        """Forget an aborted request."""
        for key in [key for key in self.streams if key[0] == request_id]:
            del self.streams[key]

    def _content(self, stream: Stream, new: Tensors) -> Tensors:
        """What a chunk with these new rows carries to the next stage."""
        return new

    def _size(self, emission: Emission, index: int) -> int:
        """Rows of payload number `index`; a request may ask a stage not to wait for more than one."""
        sizes = self.sizes.get(emission.target, (1,))
        return 1 if emission.sequence.options.get("one_by_one") else sizes[min(index, len(sizes) - 1)]


class WholeHandoff(ChunkedHandoff):
    """The whole payload goes over when the stage is done with the request; the client still gets a stream."""

    def _size(self, emission: Emission, index: int) -> int:
        return super()._size(emission, index) if emission.target == CLIENT else 1 << 62


class PrefixHandoff(ChunkedHandoff):
    """Every chunk carries its whole stream so far again, not only the new rows; its bytes grow with the answer."""

    def _content(self, stream: Stream, new: Tensors) -> Tensors:
        stream.sent = merge([stream.sent, new])
        return mark_new(stream.sent, new)


def merge(several: list[Tensors]) -> Tensors:
    """The tensors of several emissions as one: concatenated along their rows, name by name."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in chain.from_iterable(tensors.items() for tensors in several):
        parts.setdefault(name, []).append(tensor)
    return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}


def chunk_sizes(initial: int, steady: int, ramp: list[int] | None) -> tuple[int, ...]:
    """Sizes in codec frames of the first, second, ... chunk; the last one repeats.

    A ramp (say 4, 8, 16) replaces the single jump from the first size to the steady one, so that a player
    that starts at the first packet does not starve while the first steady chunk is being made.
    """
    return (*(ramp or (initial,)), steady)
