"""A step as a pure function of tensors: what can be captured once and replayed at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.export import Dim

TRACED_ROWS, TRACED_FRAMES, TRACED_TOKENS = 13, 25, 11
"""The batch that stands for all larger ones, and the frames of a pass and tokens of a prompt that stand for any number:
sizes that nothing else in a network has, or tracing takes the two for one."""

Signature = tuple[list[torch.Tensor], list[dict[int, Any]]]
"""Tensors to trace a function with, and which of their dimensions are free."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of one network for a batch of rows.

    `function(network, *batch, window, *memory)` takes the `batch` tensors, whose first dimension is the row, an integer
    tensor as long as the positions that are read (a multiple of `block`; its values mean nothing), and the `memory`
    that it writes in place; it returns a tuple of tensors, rows first. `example(rows)` makes batch tensors of the right
    types. `network` is whatever holds the weights that the function reads. `rows` is the largest batch, `positions`
    the longest window.
    """

    name: str
    network: Any
    function: Callable[..., tuple[torch.Tensor, ...]]
    example: Callable[[int], tuple[torch.Tensor, ...]]
    memory: list[torch.Tensor]
    rows: int
    positions: int
    block: int

    def signature(self, size: int) -> Signature:
        """One row, or every batch from `size` rows on; every window."""
        rows = Dim.STATIC if size == 1 else Dim("rows", min=size, max=self.rows)
        blocks = Dim("blocks", min=1, max=self.positions // self.block)
        batch = self.example(1 if size == 1 else min(TRACED_ROWS, self.rows))
        window = torch.zeros(2 * self.block, dtype=torch.int64)
        shapes = [*[{0: rows}] * len(batch), {0: self.block * blocks}, *[{}] * len(self.memory)]
        return [*batch, window, *self.memory], shapes


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A pass of one network over a batch of rows that bring any number of frames each.

    `function(network, *batch)` takes tensors whose first dimension is the row; the last dimension of the first one is
    the frame. It writes nothing in place and returns a tuple of tensors, rows first. `example(rows, frames)` makes
    batch tensors. `rows` is the largest batch, `frames` the longest pass.
    """

    name: str
    network: Any
    function: Callable[..., tuple[torch.Tensor, ...]]
    example: Callable[[int, int], tuple[torch.Tensor, ...]]
    rows: int
    frames: int

    def signature(self, size: int) -> Signature:
        """Every batch and every number of frames, from one on: one graph serves all, so `size` decides nothing."""
        rows = Dim.STATIC if self.rows == 1 else Dim("rows", min=1, max=self.rows)
        batch = self.example(min(TRACED_ROWS, self.rows), TRACED_FRAMES)
        return list(batch), [{0: rows, 2: Dim("frames", min=1, max=self.frames)}, *[{0: rows}] * (len(batch) - 1)]


@dataclass(frozen=True, slots=True)
class TracedPrefill:
    """A prefill of one network: any number of prompts, packed.

    `function(network, embeds, positions, starts, cache_rows, last, *memory)` takes what stands for each token ([N, H],
    [3, N], [N], [N]) and each prompt ([S]), and the `memory` that it writes in place; it returns a tuple of tensors.
    `example(lengths)` makes these for prompts so long, `eager(lengths)` is what the eager prefill answers to them, and
    `written(lengths)` what stands in memory afterwards. `rows` is the largest number of prompts, `tokens` that of all
    their tokens.
    """

    name: str
    network: Any
    function: Callable[..., tuple[torch.Tensor, ...]]
    example: Callable[[list[int]], tuple[torch.Tensor, ...]]
    eager: Callable[[list[int]], tuple[torch.Tensor, ...]]
    written: Callable[[list[int]], list[torch.Tensor]]
    memory: list[torch.Tensor]
    rows: int
    tokens: int

    def signature(self, size: int) -> Signature:
        """Every number of prompts and tokens, from one on: one graph serves all, so `size` decides nothing."""
        rows = Dim.STATIC if self.rows == 1 else Dim("prompts", min=1, max=self.rows)
        tokens = Dim("tokens", min=1, max=self.tokens)
        batch = self.example([TRACED_TOKENS] * min(TRACED_ROWS, self.rows))
        shapes = [{0: tokens}, {1: tokens}, {0: tokens}, {0: tokens}, {0: rows}]
        return [*batch, *self.memory], [*shapes, *[{}] * len(self.memory)]


def tensors_of(network: Any) -> dict[str, torch.Tensor]:
    """Every tensor that an object holds in attributes, lists and dicts, by a name made of the way to it."""
    found: dict[str, torch.Tensor] = {}
    replace_tensors(network, lambda name, tensor: found.setdefault(name, tensor))
    return found


def replace_tensors(part: Any, new: Callable[[str, torch.Tensor], torch.Tensor], name: str = "weight") -> Any:
    """A copy of an object in which `new(name, tensor)` stands for each tensor."""
    if isinstance(part, torch.Tensor):
        return new(name, part)
    if isinstance(part, list | tuple):
        return type(part)(replace_tensors(item, new, f"{name}_{index}") for index, item in enumerate(part))
    if isinstance(part, dict):
        return {key: replace_tensors(item, new, f"{name}_{key}") for key, item in part.items()}
    if isinstance(part, type | FunctionType | MethodType) or not hasattr(part, "__dict__"):
        return part
    other = copy.copy(part)
    for key, value in vars(part).items():
        object.__setattr__(other, key, replace_tensors(value, new, f"{name}_{key}"))
    return other
