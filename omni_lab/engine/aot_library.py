"""One compiled graph: a shared library made by AOTInductor, called through its C interface.

torch's own loader keeps Python's lock while a graph runs, so that a builder thread (engine/output.py) would wait for
every forward; a call through ctypes lets go of it.
"""

from __future__ import annotations

import ctypes
import tempfile
import zipfile
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

from omni_lab.kernels.handles import handles, release


class Constant(ctypes.Structure):
    """AOTInductorConstantMapEntry: a weight's name inside the library, and a handle of its tensor."""

    _fields_ = [("name", c_char_p), ("handle", c_void_p)]


class AotLibrary:
    """Calls with a list of tensors return a list of tensors; weights stay where they are.

    `weights` are known by the names that the graph was exported with. Raises OSError or BadZipFile if the package is
    damaged or has no library, RuntimeError if the library refuses a call; what it says about it is on stderr.
    """

    container: c_void_p | None = None

    def __init__(self, package: Path, weights: dict[str, torch.Tensor]) -> None:
        self.library = _open(package)
        self.weights: list[int] = []
        self.kept: list[torch.Tensor] = []
        self.container = c_void_p()
        self._call("CreateWithDevice", byref(self.container), c_size_t(1), b"cpu", None)
        self.output_handles = (c_void_p * self._count("GetNumOutputs"))()
        self.input_handles = (c_void_p * self._count("GetNumInputs"))()
        self.run = self.library.AOTInductorModelContainerRun
        self.run.argtypes = [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_void_p), c_size_t, c_void_p, c_void_p]
        self._bind(weights)

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """One run; one at a time."""
        given, taken = self.input_handles, self.output_handles
        given[:] = handles(inputs)  # the library releases these
        if self.run(self.container, given, len(given), taken, len(taken), None, None):
            raise RuntimeError("the compiled graph failed; the cause is on stderr")
        return release(taken)

    def __del__(self) -> None:
        if self.container:
            self._call("Delete", self.container)
            release(self.weights)

    def _bind(self, weights: dict[str, torch.Tensor]) -> None:
        """Tell the library where each of its weights is; the handles stay ours to release."""
        names = []
        for index in range(self._count("GetNumConstants")):
            name, exported = c_char_p(), c_char_p()
            self._call("GetConstantName", self.container, c_size_t(index), byref(name))
            self._call("GetConstantOriginalFQN", self.container, c_size_t(index), byref(exported))
            names.append((name.value, exported.value.decode()))
        self.kept = [weights[exported] for _, exported in names]
        self.weights = handles([borrowed(tensor) for tensor in self.kept])
        bound = zip(names, self.weights, strict=True)
        pairs = (Constant * len(names))(*((name, handle) for (name, _), handle in bound))
        update = "UpdateUserManagedConstantBufferPairs"
        self._call(update, self.container, pairs, c_size_t(len(pairs)), c_bool(False), c_bool(True))

    def _count(self, what: str) -> int:
        count = c_size_t()
        self._call(what, self.container, byref(count))
        return count.value

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self.library, f"AOTInductorModelContainer{name}")
        function.restype = c_int32
        if function(*arguments):
            raise RuntimeError(f"{name} of a compiled graph failed; the cause is on stderr")


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, but its memory is not kept: a library never lets go of what it was told to be its weights."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    storage = tensor.untyped_storage()
    memory = (c_char * storage.nbytes()).from_address(storage.data_ptr())
    view = torch.frombuffer(memory, dtype=tensor.dtype)
    return view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@cache
def _open(package: Path) -> ctypes.CDLL:
    """The library of a package, unpacked to a place that is gone at once: an open library needs its file no more."""
    with zipfile.ZipFile(package) as files, tempfile.TemporaryDirectory(prefix="omni_lab_") as folder:
        name = next((name for name in files.namelist() if name.endswith(".so")), None)
        if name is None:
            raise zipfile.BadZipFile("there is no library in it")
        return ctypes.CDLL(files.extract(name, folder))
