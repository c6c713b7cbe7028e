"""A step as a pure function of tensors: what can be captured once and replayed at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch


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
