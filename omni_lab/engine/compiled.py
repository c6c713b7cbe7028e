"""Captured steps on the CPU: each step exported as one graph, compiled to a shared library, and kept on disk.

One graph of a decode step serves a single row, and one every larger batch, with the batch and the window as free sizes;
a batch of two or three is filled up to four. One graph of a vocoder's pass serves all rows and frames, and one of a
prefill all prompts. The library holds code alone: the weights stay where the network has them, and kernels are in a
library of their own (see `kernels`). Compiling takes a minute or so and happens in other processes (see
`pipeline/graphs.py`); loading takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from zipfile import BadZipFile

import torch

from omni_lab.engine.aot_library import AotLibrary
from omni_lab.engine.traced import TRACED_FRAMES, TracedPass, TracedPrefill, TracedStep, replace_tensors, tensors_of
from omni_lab.kernels.library import KernelsMissing, open_kernels
from omni_lab.kernels.ops import SHIMS

SIZES = (1, 4)
"""The smallest batch of each graph: one serves a row alone, the other all batches from four rows on."""

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "inplace_buffers": False,
    "joint_graph_constant_folding": False,
    "aot_inductor.custom_ops_to_c_shims": SHIMS,
}
"""Weights are not copied into the library. Inductor of torch 2.13 miscompiles a frame of one row when it reuses
buffers in place. And a weight that happens to be the same everywhere must not become a number of the code, which serves
every checkpoint of this shape."""

TOLERANCE = 1e-3
"""How far a captured step's floats may be from the eager step's, relative to the largest."""


class GraphRefused(Exception):
    """A captured step cannot be had; the message says why. The step runs eager."""


class CompiledGraphs:
    """The graphs of one step, loaded and compared with the eager step.

    They must be in `folder`. Raises GraphRefused if one computes something else.
    """

    def __init__(self, step: TracedStep, folder: Path) -> None:
        self.step = step
        self.windows: dict[int, torch.Tensor] = {}
        weights = tensors_of(step.network)
        self.graphs = {size: open_graph(graph_file(folder, step.name, size), weights) for size in sizes(step.rows)}
        for rows in (1, SIZES[1], SIZES[1] + 3):
            if rows <= step.rows and min(rows, SIZES[1]) in self.graphs:
                self._compare(rows)

    def width(self, count: int) -> int:
        """The rows that a batch of `count` is filled up to."""
        return max(count, SIZES[1]) if count > 1 and SIZES[1] in self.graphs else count

    def run(self, end: int, *batch: torch.Tensor) -> list[torch.Tensor] | None:
        """The outputs for batch tensors of `width` rows that read at least positions 0..end-1; None without a graph."""
        graph = self.graphs.get(min(len(batch[0]), SIZES[1]))
        return None if graph is None else graph([*batch, self._window(end), *self.step.memory])

    def _window(self, end: int) -> torch.Tensor:
        end += -end % self.step.block
        if end not in self.windows:
            self.windows[end] = torch.zeros(end, dtype=torch.int64)
        return self.windows[end]

    def _compare(self, rows: int) -> None:
        batch, window = self.step.example(rows), self._window(self.step.block)
        compare(
            lambda: self.run(len(window), *batch),
            lambda: self.step.function(self.step.network, *batch, window, *self.step.memory),
            f"at batch {rows}",
        )


class CompiledPass:
    """The graph of one pass, loaded and compared with the eager pass; it takes every shape as it is.

    It must be in `folder`. Raises GraphRefused if it computes something else.
    """

    def __init__(self, traced: TracedPass, folder: Path) -> None:
        self.traced = traced
        self.graph = open_graph(graph_file(folder, traced.name, SIZES[0]), tensors_of(traced.network))
        for rows, frames in {(1, 4), (min(2, traced.rows), TRACED_FRAMES)}:
            batch = traced.example(rows, frames)
            compare(
                lambda batch=batch: self.run(*batch),
                lambda batch=batch: traced.function(traced.network, *batch),
                f"at {rows} rows of {frames} frames",
            )

    def shape(self, rows: int, frames: int) -> tuple[int, int] | None:
        """The rows and frames that a pass of this shape is filled up to: its own; None without a graph."""
        return (rows, frames) if rows <= self.traced.rows and frames <= self.traced.frames else None

    def run(self, *batch: torch.Tensor) -> list[torch.Tensor]:
        """The outputs for batch tensors of a `shape`."""
        return self.graph([tensor.contiguous() for tensor in batch])  # the code knows no other strides


class CompiledPrefill:
    """The graph of one prefill, loaded and compared with the eager prefill; it takes every number of prompts.

    It must be in `folder`. Raises GraphRefused if it computes something else.
    """

    def __init__(self, traced: TracedPrefill, folder: Path) -> None:
        self.traced = traced
        self.graph = open_graph(graph_file(folder, traced.name, SIZES[0]), tensors_of(traced.network))
        for lengths in ([9], [40, 5][: traced.rows]):
            compare(
                lambda lengths=lengths: [*self.run(*traced.example(lengths)), *traced.written(lengths)],
                lambda lengths=lengths: [*traced.eager(lengths), *traced.written(lengths)],
                f"for prompts of {lengths} tokens",
            )

    def run(self, *batch: torch.Tensor) -> list[torch.Tensor]:
        """The outputs for batch tensors of at most the traced rows and tokens."""
        return self.graph([*batch, *self.traced.memory])


Outputs = Callable[[], Sequence[torch.Tensor]]


def compare(captured: Outputs, eager: Outputs, where: str) -> None:
    """Raises GraphRefused if the captured step fails or differs: whole numbers at all, floats beyond TOLERANCE."""
    try:
        outputs = captured()
    except RuntimeError as error:
        raise GraphRefused(f"{where} it fails: {str(error).splitlines()[0]}") from error
    for index, (left, right) in enumerate(zip(outputs, eager(), strict=True)):
        off = (left - right).abs().max().item()
        if not off <= (TOLERANCE * right.abs().max().item() if right.is_floating_point() else 0):
            raise GraphRefused(f"{where} output {index} of the captured step is {off:g} off that of the eager step")


def sizes(rows: int) -> list[int]:
    """The batches to trace for a step of at most `rows` rows."""
    return [size for size in SIZES if size <= rows]


def graph_file(folder: Path, name: str, size: int) -> Path:
    return folder / f"{name}-{size}.pt2"


def export(step: TracedStep | TracedPass | TracedPrefill, size: int) -> torch.export.ExportedProgram:
    """The graph of a step for one row, or for every batch from `size` rows on; that of a pass or prefill is for all."""
    with torch.no_grad():
        inputs, shapes = step.signature(size)
        return torch.export.export(_Module(step), (inputs,), dynamic_shapes=(shapes,), strict=False)


def compile_graph(step: TracedStep | TracedPass | TracedPrefill, size: int, folder: Path) -> None:
    """Compile one graph to a package in `folder`. Raises KernelsMissing if the kernels cannot be compiled."""
    import torch._inductor

    open_kernels()
    package = graph_file(folder, step.name, size)
    partial = package.with_suffix(".partial.pt2")
    torch._inductor.aoti_compile_and_package(export(step, size), package_path=str(partial), inductor_configs=OPTIONS)
    partial.rename(package)


def open_graph(package: Path, weights: dict[str, torch.Tensor]) -> AotLibrary:
    """A compiled graph, ready to be called. Raises GraphRefused if its package is damaged."""
    try:
        open_kernels()
        return AotLibrary(package, weights)
    except KernelsMissing as error:
        raise GraphRefused(str(error)) from error
    except (OSError, BadZipFile) as error:
        raise GraphRefused(f"{package} cannot be opened ({error}); delete it and it is compiled anew") from error


class _Module(torch.nn.Module):
    """A step or a pass whose weights are named buffers: the compiled graph asks for them by these names."""

    def __init__(self, step: TracedStep | TracedPass | TracedPrefill) -> None:
        super().__init__()
        self.step = step
        for name, tensor in tensors_of(step.network).items():
            self.register_buffer(name, tensor)

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        network = replace_tensors(self.step.network, lambda name, tensor: getattr(self, name))
        return self.step.function(network, *inputs)
