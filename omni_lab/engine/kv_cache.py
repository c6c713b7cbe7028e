"""The KV cache of one stage: a dense block of rows, one row for each running sequence."""

from __future__ import annotations

import contextlib
import copy
import math
import mmap
from collections.abc import Sequence

import torch


class KVCache:
    """Keys and values of `rows` sequences of at most `max_length` positions, for every decoder layer.

    The running batch is always rows 0..B-1, so a decode step reads slices and never gathers. Memory is zeroed
    lazily by the operating system: rows cost nothing until they are written.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        # One row and one position more than are ever used: tracing makes a special case of a slice that is the whole.
        rows, max_length = rows + 1, max_length + 1
        self.shape = (2, rows * kv_heads, max_length, head_dim)
        self.kv_heads = kv_heads
        shape = (math.prod(self.shape[:-1]), head_dim)
        self.lines = [lazy_zeros(shape, dtype, torch.device(device)) for _ in range(layers)]
        """For each layer all keys, then all values, as [2 * rows * kv_heads * max_length, head_dim]."""
        first_lines = torch.arange(2 * rows * kv_heads, device=device) * max_length
        self.first_lines = first_lines.view(2, rows, kv_heads).transpose(0, 1).reshape(rows, 2 * kv_heads).contiguous()
        """For each row the lines of position 0: its key heads, then its value heads."""

    def over(self, lines: Sequence[torch.Tensor]) -> KVCache:
        """This cache with other memory: a traced step gets its lines as inputs."""
        other = copy.copy(self)
        other.lines = list(lines)
        return other

    def lines_at(self, lengths: torch.Tensor) -> torch.Tensor:
        """Lines [B * 2 * kv_heads] that rows 0..B-1 write next, where row b holds `lengths[b]` positions."""
        return (self.first_lines[: lengths.shape[0]] + lengths.unsqueeze(1)).flatten()

    def lines_of(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Lines [N * 2 * kv_heads] of any rows [N], each at its own position [N]."""
        return (self.first_lines.index_select(0, rows) + positions.unsqueeze(1)).flatten()

    def row(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one row in one layer, each [kv_heads, max_length, head_dim]."""
        heads = slice(row * self.kv_heads, (row + 1) * self.kv_heads)
        keys, values = self.lines[layer].view(self.shape)[:, heads].unbind(0)
        return keys, values

    def window(self, rows: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of positions 0..end-1 of the first rows, for each layer: keys [rows * kv_heads, head_dim, end]
        (transposed, ready to be multiplied with queries) and values [rows * kv_heads, end, head_dim]."""
        views = []
        for lines in self.lines:
            keys, values = lines.view(self.shape)[:, : rows * self.kv_heads, :end].unbind(0)
            views.append((keys.transpose(1, 2), values))
        return views

    def move(self, source_row: int, target_row: int, length: int) -> None:
        """Copy the first `length` positions of one row to another; the source keeps its contents."""
        for layer in range(len(self.lines)):
            for source, target in zip(self.row(layer, source_row), self.row(layer, target_row), strict=True):
                target[:, :length] = source[:, :length]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose host pages exist only once they are written; `torch.zeros` on the CPU would touch them all.

    The pages are small ones: where they are huge (NumPy asks for such), the first prompts wait while all of the cache
    is cleared.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def row_bytes(layers: int, kv_heads: int, max_length: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one sequence's keys and values."""
    return 2 * layers * kv_heads * max_length * head_dim * dtype.itemsize


def rows_within(
    budget_bytes: int, layers: int, kv_heads: int, max_length: int, head_dim: int, dtype: torch.dtype
) -> int:
    """How many sequences fit into a memory budget."""
    return budget_bytes // row_bytes(layers, kv_heads, max_length, head_dim, dtype)
