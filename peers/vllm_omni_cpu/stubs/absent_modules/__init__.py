"""Packages of which only the names exist: whatever is imported from them is a class that does nothing.

Beside the CPU build of torch, torchvision and torchaudio do not import (their operators are built for another torch),
and vLLM-Omni imports both although the Qwen3-Omni stages call neither for text prompts.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(type):
    """A class with every attribute, which is again such a class; it may stand in type hints."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Nothing(metaclass=_Anything):
    """Takes any arguments. As a decorator with arguments it leaves what it decorates as it is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, first: Any = None, *_: Any, **__: Any) -> Any:
        return first

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = _attribute(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith(f"{self.package}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


_MODES = ("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_INTERPOLATION = enum.Enum("InterpolationMode", {mode.upper(): mode.replace("_", "-") for mode in _MODES})
"""Transformers makes a table of its members when it is imported."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _INTERPOLATION if name == "InterpolationMode" else _Anything(name, (_Nothing,), {})


def stand_in(package: str) -> None:
    """Makes the module `package`, which is being imported, such a package."""
    sys.modules[package].__class__ = _Module
    sys.meta_path.insert(0, _Finder(package))
