"""Tensors as C functions take them: handles (AtenTensorHandle), which torch gives out in capsules."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_char_p, c_void_p

import torch
from torch._C._aoti import alloc_tensors_by_stealing_from_void_ptrs, unsafe_alloc_void_ptrs_from_tensors

content = ctypes.pythonapi.PyCapsule_GetPointer
content.argtypes, content.restype = [ctypes.py_object, c_char_p], c_void_p
capsule = ctypes.pythonapi.PyCapsule_New
capsule.argtypes, capsule.restype = [c_void_p, c_char_p, c_void_p], ctypes.py_object


def handles(tensors: list[torch.Tensor]) -> list[int]:
    """New handles of tensors."""
    return [content(handle, None) for handle in unsafe_alloc_void_ptrs_from_tensors(tensors)]


def release(owned: Iterable[int]) -> list[torch.Tensor]:
    """The tensors of handles, which end here."""
    return alloc_tensors_by_stealing_from_void_ptrs([capsule(handle, None, None) for handle in owned])
