"""Reading a checkpoint directory: its `config.json`, and its tensors straight into a network's own memory.

Tensors are copied one by one, in slices, from memory-mapped safetensors files into views of parameters that
already exist (fused ones included), so that loading never holds a second copy of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omni_lab.core import PipelineError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SLICE_BYTES = 16 << 20
MAPPED_BYTES = 64 << 20
"""A file is opened again after this many bytes: pages read through a mapping count as resident until it closes."""


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a Qwen3-Omni checkpoint, plus `newline_token_id` from the vocabulary if there is one.

    Raises PipelineError if the file is missing, is not JSON, or describes another kind of model.
    """
    config = _read_json(directory / "config.json")
    if config.get("model_type") != "qwen3_omni_moe":
        raise PipelineError(
            f"{directory / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'qwen3_omni_moe'; "
            "give the directory of a Qwen3-Omni checkpoint"
        )
    newline = _newline_token(directory)
    if newline is not None:
        config["newline_token_id"] = newline
    return config


def load_weights(directory: Path, slots: dict[str, torch.Tensor], prefixes: tuple[str, ...]) -> int:
    """Copy checkpoint tensors into `slots` (tensor name -> view of the same shape) and return the bytes read.

    Values are converted to the slot's dtype and device. Reads `model.safetensors`, or the shards that
    `model.safetensors.index.json` names. Raises PipelineError, before anything is copied, if a slot's tensor is
    missing or has another shape, or if a tensor under one of `prefixes` has no slot.
    """
    files = _files(directory)
    shapes = {name: (file, shape) for file in files for name, shape in _shapes(file).items()}
    where = directory / (INDEX_FILE if (directory / INDEX_FILE).exists() else SINGLE_FILE)
    _check(where, shapes, slots, prefixes)
    count = 0
    for file in files:
        count += _copy(file, {name: slot for name, slot in slots.items() if shapes[name][0] == file})
    return count


def allocate(network: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a network that was built on the meta device its memory, uninitialised: `load_weights` fills it.

    (`Module.to_empty` does this too, and imports the whole of torch's symbolic machinery for it.)
    """
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        return [directory / SINGLE_FILE]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise PipelineError(f"{index}: weight_map must map tensor names to files; download the index again")
    return [directory / name for name in sorted(set(names.values()))]


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with _open(file) as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _check(
    where: Path,
    shapes: dict[str, tuple[Path, tuple[int, ...]]],
    slots: dict[str, torch.Tensor],
    prefixes: tuple[str, ...],
) -> None:
    missing = [name for name in slots if name not in shapes]
    extra = [name for name in shapes if name.startswith(prefixes) and name not in slots]
    if missing:
        raise PipelineError(f"{where}: {_listed(missing)} missing; the config asks for more than the checkpoint holds")
    if extra:
        raise PipelineError(f"{where}: {_listed(extra)} not part of the network that config.json describes")
    for name, slot in slots.items():
        file, shape = shapes[name]
        if shape != tuple(slot.shape):
            raise PipelineError(f"{file}: {name} has shape {shape}, config.json asks for {tuple(slot.shape)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


def _copy(file: Path, slots: dict[str, torch.Tensor]) -> int:
    """Copy one file's tensors in slices of rows, with a fresh mapping for every MAPPED_BYTES."""
    count = 0
    work = _slices(slots)
    part = next(work, None)
    while part is not None:
        mapped = 0
        with _open(file) as tensors:
            while part is not None and mapped < MAPPED_BYTES:
                name, start, stop = part
                values = tensors.get_slice(name)[start:stop]
                slots[name][start:stop].copy_(values)
                mapped += values.nbytes
                del values
                part = next(work, None)
        count += mapped
    return count


def _slices(slots: dict[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
    """(name, first row, last row + 1) of pieces of about SLICE_BYTES."""
    for name in sorted(slots):
        slot = slots[name]
        rows = max(1, SLICE_BYTES // (4 * slot[0].numel()))
        for start in range(0, slot.shape[0], rows):
            yield name, start, min(start + rows, slot.shape[0])


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A mapped safetensors file. A file that is cut short or damaged is a PipelineError."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except FileNotFoundError:
        raise PipelineError(f"{file}: no such file; the checkpoint directory is not complete") from None
    except (SafetensorError, OSError) as error:
        raise PipelineError(f"{file}: cannot be read ({error}); download the file again") from error


def _newline_token(directory: Path) -> int | None:
    """The id of a line feed, which byte-level BPE vocabularies write as U+010A."""
    if (directory / "vocab.json").exists():
        return _read_json(directory / "vocab.json").get("\u010a")
    if (directory / "tokenizer.json").exists():
        return _read_json(directory / "tokenizer.json").get("model", {}).get("vocab", {}).get("\u010a")
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"{file}: no such file; give the directory of a complete checkpoint") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PipelineError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise PipelineError(f"{file}: must hold one JSON object, got {type(values).__name__}")
    return values
