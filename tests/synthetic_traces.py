"""Traces with known answers, as the Chrome JSON that torch's profiler writes. Times are whole µs, so that the truth can
be counted µs by µs (`Program.truth`), without the interval arithmetic that is under test."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PID, THREAD = 4242, 4243
ORIGIN = 5_147_375_751_000
"""Profilers count µs since the machine started, or since 1970: never from 0."""


@dataclass
class Program:
    """What a program did. `at` and `end` are in µs from the origin."""

    pid: int = PID
    name: str = "python"
    device_row: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    busy: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    correlation: int = 0

    def range(self, name: str, at: float, end: float, cat: str = "cpu_op", thread: int = THREAD, **args: Any) -> None:
        times = {"ts": ORIGIN + at, "dur": end - at}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": self.pid, "tid": thread, **times, "args": args})

    def step(
        self, at: int, end: int, name: str | None = "step {number} decode batch={batch} tokens={batch}", batch: int = 1
    ):
        """A step begins; what is launched within it is its own. Without a name nothing marks it."""
        self.steps.append({"at": at, "end": end, "batch": batch, "busy": []})
        if name is not None:
            self.range(name.format(number=len(self.steps) - 1, batch=batch), at, end, "user_annotation")

    def launch(
        self,
        at: int,
        begin: int,
        end: int,
        name: str = "gemm",
        cat: str = "kernel",
        stream: int = 7,
        device: int = 0,
        call: str | None = None,
        seen: bool = True,
        took: int = 2,
    ) -> None:
        """Host work at `at` that keeps a device busy from `begin` to `end`; `seen`: the trace has the activity."""
        self.correlation += 1
        calls = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}
        self.range(call or calls[cat], at, at + took, "cuda_runtime", correlation=self.correlation)
        if seen:
            self.activity(begin, end, name, cat, stream, device)
        else:
            self._work(begin, end, device)

    def activity(self, begin: int, end: int, name: str, cat: str = "kernel", stream: int = 7, device: int = 0) -> None:
        """Device activity of the launch before, such as one of the kernels of a graph."""
        row = self.device_row + device
        times = {"ts": ORIGIN + begin, "dur": end - begin}
        args = {"device": device, "stream": stream, "correlation": self.correlation}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": row, "tid": stream, **times, "args": args})
        self._work(begin, end, device)

    def _work(self, begin: int, end: int, device: int) -> None:
        self.busy.setdefault(device, []).append((begin, end))
        if self.steps:
            self.steps[-1]["busy"].append((begin, end))

    def truth(self) -> tuple[float, list[int]]:
        """The idle share from the first step to the end of the last, and every gap in µs."""
        spans = [step["busy"] or [(step["at"], step["end"])] for step in self.steps]
        work = [span for spans_of_device in self.busy.values() for span in spans_of_device]
        work = work or [(step["at"], step["end"]) for step in self.steps]
        timeline = np.zeros(max(end for _, end in work) + 1, bool)
        for begin, end in work:
            timeline[begin:end] = True
        first = [min(begin for begin, _ in one) for one in spans]
        last = [max(end for _, end in one) for one in spans]
        gaps = [int((~timeline[max(last[: index + 1]) : begin]).sum()) for index, begin in enumerate(first[1:])]
        return float(1 - timeline[min(first) : max(last)].mean()), gaps

    def document(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": 'a {device}, ["quoted"]'}],
            "displayTimeUnit": "ms",
            "traceEvents": [self.head(), *self.events],
            "traceName": "synthetic",
        }

    def head(self) -> dict[str, Any]:
        return {"ph": "M", "name": "process_name", "pid": self.pid, "tid": 0, "ts": ORIGIN, "args": {"name": self.name}}

    def write(self, path: Path, indent: int | None = None) -> Path:
        return write(self.document(), path, indent)


def write(document: dict[str, Any] | list[Any], path: Path, indent: int | None = None) -> Path:
    data = json.dumps(document, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def decoder(
    steps: int = 40, mark: str | None = "step {number} decode batch={batch} tokens={batch}", **launch: Any
) -> Program:
    """Three kernels a step, 1000 µs, then 300 µs until the first of the next. Batches are 1, 2, 1, 2, ..."""
    program = Program()
    for index in range(steps):
        at = index * 1300
        program.step(at, at + 1030, mark, batch=1 + index % 2)
        program.range("aten::embedding", at + 2, at + 8)
        program.launch(at + 3, at + 10, at + 310, "embedding", **launch)
        program.range("aten::linear", at + 10, at + 20)
        program.launch(at + 12, at + 310, at + 810, "gemm", **launch)
        program.range("aten::argmax", at + 22, at + 30)
        program.launch(at + 24, at + 810, at + 1010, "argmax", **launch)
        program.range("cudaStreamSynchronize", at + 32, at + 1020, "cuda_runtime")
        program.range("detokenize", at + 1040, at + 1240, "cpu_op")
    return program
