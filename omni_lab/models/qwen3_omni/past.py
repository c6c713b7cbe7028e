"""What a streaming network remembers: the last input steps of every part that looks back."""

from __future__ import annotations

import torch
from torch import Tensor


class Past:
    """The steps before a pass and the steps to keep after it, for a batch of streams.

    The parts of a network ask for their past, and give what is to be kept, in the order in which they run: so the
    memory of a stream is one flat row [S], and a pass takes rows [B, S] in and gives rows [B, S] out. Without a memory
    the streams begin with this pass. `frames` is the length T of the pass, `lengths` [B] the frames that a row really
    has (all T if not given): what it keeps is taken at its own end, so padding on the right leaves no trace.
    Parts that raise the rate multiply `rate`, the steps of a frame.
    """

    def __init__(self, memory: Tensor | None, frames: int, lengths: Tensor | None) -> None:
        self.begun = memory is not None
        self.rate = 1
        self._memory = memory
        self._read = 0
        self._padding = None if lengths is None else frames - lengths
        self._kept: list[Tensor] = []

    def before(self, signal: Tensor, steps: int) -> Tensor:
        """The last `steps` steps before signal [B, channels, T]; zeros where streams begin."""
        shape = (*signal.shape[:2], steps)
        if self._memory is None:
            return signal.new_zeros(()).expand(shape)
        begin, self._read = self._read, self._read + shape[1] * steps
        return self._memory[:, begin : self._read].view(shape)

    def before_if_any(self, signal: Tensor, steps: int) -> Tensor:
        """As `before`, but of no step where streams begin."""
        return self.before(signal, steps if self.begun else 0)

    def keep(self, joined: Tensor, steps: int) -> None:
        """Remember the last `steps` steps of joined [B, channels, past + T].

        If there are fewer yet, the first one fills the place: its reader must not count what was before the stream.
        """
        width = joined.shape[-1]
        if self._padding is None and width >= steps:
            kept = joined[..., width - steps :]
        else:
            last = torch.arange(width - steps, width, device=joined.device).expand(joined.shape[0], -1)
            if self._padding is not None:
                last = last - self._padding[:, None] * self.rate
            kept = joined.gather(2, last.clamp(min=0)[:, None].expand(-1, joined.shape[1], -1))
        self.take(kept)

    def ends(self, signal: Tensor) -> Tensor:
        """How many steps of signal [B, channels, T] each row really has [B]."""
        steps = signal.new_full(signal.shape[:1], signal.shape[2], dtype=torch.int64)
        return steps if self._padding is None else steps - self._padding * self.rate

    def take(self, kept: Tensor) -> None:
        """As `keep`, of steps that a kernel chose [B, channels, steps]."""
        self._kept.append(kept.flatten(1))

    def memory(self) -> Tensor:
        """All that was kept, [B, S]."""
        return torch.cat(self._kept, 1)
