"""Rotary positions of a prompt with pictures and clips: time, height and width (M-RoPE, Qwen2-VL, arXiv:2409.12191)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Grid:
    """Vision tokens of one picture or clip: steps in time, `seconds` apart, rows, columns (after merging patches)."""

    times: int
    rows: int
    columns: int
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return self.times * self.rows * self.columns


def mrope_positions(is_vision: list[bool], grids: list[Grid], per_second: int) -> torch.Tensor:
    """Positions [3, P] of a prompt whose vision placeholders belong to `grids`, in order.

    Text and audio count up on all three axes. Vision tokens start at the next free position and go up along their
    own axes, `per_second` positions for a second of a clip; what follows goes on above the largest of them.
    Whole numbers (int64), unless a clip's frame rate puts its frames between two positions (then float32).
    """
    parts: list[torch.Tensor] = []
    start, position = 0, 0.0
    for grid in grids:
        first = is_vision.index(True, start)
        parts += [_count(position, first - start), _grid_positions(grid, per_second) + (position + first - start)]
        position = parts[-1].max().item() + 1
        start = first + grid.tokens
    parts.append(_count(position, len(is_vision) - start))
    positions = torch.cat(parts, dim=1)
    return positions.long() if torch.equal(positions, positions.round()) else positions


def _count(start: float, length: int) -> torch.Tensor:
    return (torch.arange(length, dtype=torch.float32) + start).expand(3, -1)


def _grid_positions(grid: Grid, per_second: int) -> torch.Tensor:
    """[3, tokens] relative to the first token, time-major."""
    times = torch.arange(grid.times, dtype=torch.float32) * grid.seconds * per_second
    axes = torch.meshgrid(times, torch.arange(float(grid.rows)), torch.arange(float(grid.columns)), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])
