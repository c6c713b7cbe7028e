"""Rotary position embedding: angles of the three axes of M-RoPE, and two ways to turn a step's single tokens."""

from __future__ import annotations

import torch

from omni_lab.models.qwen3_omni.config import DecoderConfig


class Rotary:
    """Rotary position embedding of the half-split kind, with the interleaved axes of M-RoPE.

    Of the head_dim / 2 frequencies, those at 1, 4, 7, ... (mrope_section[1] of them) follow the height, those at
    2, 5, 8, ... (mrope_section[2]) the width, and all others the time axis (Qwen3-Omni technical report,
    arXiv 2509.17765; axes in the order of transformers' `modeling_qwen3_omni_moe.py`).
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        size = config.head_dim
        self.dtype = dtype
        self.frequencies = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
        self.both_halves = torch.cat((self.frequencies, self.frequencies))
        self.axis = torch.zeros(size // 2, dtype=torch.int64, device=device)
        for axis in (1, 2) if config.mrope_section else ():
            self.axis[axis : 3 * config.mrope_section[axis] : 3] = axis
        self.identity = torch.eye(size, device=device)
        self.quarter_turn = torch.eye(size, device=device).roll(size // 2, 1)
        self.quarter_turn[size // 2 :] *= -1

    def axes(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, 1, head_dim] at positions [3, N] (time, height, width)."""
        angles = positions.float()[self.axis].t() * self.frequencies
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def matrices(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations [B, head_dim, head_dim] at positions [B] that are equal on all axes: x @ matrix rotates x.

        For single tokens one product replaces the several calls of `rotate`.
        """
        angles = positions.float().view(-1, 1, 1) * self.both_halves
        return torch.addcmul(angles.cos() * self.identity, angles.sin(), self.quarter_turn).to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x2, x1) * sin for x [N, heads, head_dim] with halves (x1, x2)."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-second, first), -1), sin)


class LinearRotation:
    """Turns single tokens whose position is the same on all axes, as that of every token behind a prompt is.

    One number a row, and one product a layer in the place of several calls.
    """

    axes = ()
    turn = staticmethod(torch.bmm)

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [B] -> rotations [B, head_dim, head_dim]."""
        return self.rotary.matrices(positions)


class MultimodalRotation:
    """Turns single tokens by the general rule: positions for three axes, and each frequency follows its own."""

    axes = (3,)

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [B, 3] (time, height, width) -> cosines and sines [B, 1, head_dim]."""
        return self.rotary.axes(positions.t())

    def turn(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [B, heads, head_dim], turned."""
        return rotate(x, *rotation)


Rotation = LinearRotation | MultimodalRotation
"""What a decode step turns queries and keys with: `turn(qk, at(positions))` with positions [B, *axes]."""
