"""The decode state of a batch: what every row of the cache carries from one step to the next, on the device or not.

Both kinds have one interface. Rows 0..B-1 are the running batch (see `engine/kv_cache.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch


class Batch(NamedTuple):
    """State of rows 0..B-1 on the device, valid until a row changes.

    Last `tokens` [B] int64; rotary `positions` [B, *axes] float32 of the next ones (not whole between the frames of a
    clip); `lengths` [B] int64 of what the cache holds; `hidden` [B, width], the network's last output if it is wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    hidden: torch.Tensor


class Rows(Protocol):
    """How a stage uses the state of its rows. `hidden` is left out where its width is 0."""

    def __len__(self) -> int: ...

    def enter(
        self, row: int, token: torch.Tensor, position: torch.Tensor, length: int, hidden: torch.Tensor | None = None
    ) -> None:
        """A sequence begins in `row`: its first token and next position (scalars), its hidden state [width]."""

    def clear(self, row: int) -> None:
        """A sequence takes `row` that will make no step."""

    def batch(self, count: int) -> Batch:
        """Rows 0..count-1."""

    def advance(self, rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        """`rows`, in ascending order, took a step that gave them tokens [n] and hidden states [n, width]."""

    def length(self, row: int) -> int:
        """Positions of the cache that `row` has written."""

    def move(self, source: int, target: int) -> None:
        """Copy the state of one row to another."""


class ResidentRows:
    """State stays in tensors of the device and is updated in place; a batch is a view of them."""

    def __init__(
        self,
        rows: int,
        device: torch.device,
        axes: tuple[int, ...] = (),
        width: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.state = Batch(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, *axes, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, width, dtype=dtype, device=device),
        )
        self.views = [Batch(*(part[:count] for part in self.state)) for count in range(rows + 1)]

    def __len__(self) -> int:
        return len(self.state.tokens)

    def enter(
        self, row: int, token: torch.Tensor, position: torch.Tensor, length: int, hidden: torch.Tensor | None = None
    ) -> None:
        self.state.tokens[row] = token
        self.state.positions[row] = position
        self.state.lengths[row] = length
        if hidden is not None:
            self.state.hidden[row] = hidden

    def clear(self, row: int) -> None:
        for part in self.state:
            part[row] = 0

    def batch(self, count: int) -> Batch:
        return self.views[count]

    def advance(self, rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        if rows[-1] < len(rows):  # none is left out: plain copies
            state = self.views[len(rows)]
            state.tokens.copy_(tokens)
            if hidden is not None:
                state.hidden.copy_(hidden)
            state.positions.add_(1)
            state.lengths.add_(1)
        else:
            state, index = self.state, torch.tensor(rows, device=tokens.device)
            state.tokens[index] = tokens
            if hidden is not None:
                state.hidden[index] = hidden
            state.positions[index] += 1
            state.lengths[index] += 1

    def length(self, row: int) -> int:
        return int(self.state.lengths[row])

    def move(self, source: int, target: int) -> None:
        for part in self.state:
            part[target] = part[source]


class HostRow(NamedTuple):
    """The state of one sequence on the host: plain values, `position` [*axes] float32 and `hidden` [width]."""

    token: int
    position: np.ndarray
    length: int
    hidden: torch.Tensor


class HostRows:
    """State lives with each sequence on the host: every step gathers it, sends it to the device and fetches it back.

    So model runners worked before they had resident buffers. Positions are float32 here too: adding up rounds as it
    does on the device.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        axes: tuple[int, ...] = (),
        width: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = device
        self.empty = HostRow(0, np.zeros(axes, np.float32), 0, torch.zeros(width, dtype=dtype))
        self.rows = [self.empty] * rows

    def __len__(self) -> int:
        return len(self.rows)

    def enter(
        self, row: int, token: torch.Tensor, position: torch.Tensor, length: int, hidden: torch.Tensor | None = None
    ) -> None:
        positions = np.full_like(self.empty.position, float(position))
        kept = self.empty.hidden if hidden is None else hidden.to("cpu", copy=True)
        self.rows[row] = HostRow(int(token), positions, length, kept)

    def clear(self, row: int) -> None:
        self.rows[row] = self.empty

    def batch(self, count: int) -> Batch:
        rows = self.rows[:count]
        return Batch(
            torch.tensor([row.token for row in rows], device=self.device),
            torch.from_numpy(np.stack([row.position for row in rows])).to(self.device),
            torch.tensor([row.length for row in rows], device=self.device),
            torch.stack([row.hidden for row in rows]).to(self.device),
        )

    def advance(self, rows: list[int], tokens: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        fetched = [self.empty.hidden] * len(rows) if hidden is None else hidden.to("cpu", copy=True).unbind(0)
        for row, token, state in zip(rows, tokens.tolist(), fetched, strict=True):
            old = self.rows[row]
            self.rows[row] = HostRow(token, old.position + np.float32(1), old.length + 1, state)

    def length(self, row: int) -> int:
        return self.rows[row].length

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]
