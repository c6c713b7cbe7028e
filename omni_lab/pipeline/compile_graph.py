"""The main program that compiles graphs; `pipeline/graphs.py` starts it.

It reads a job a line, (plan, name, smallest batch) as JSON, and answers each with a line.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path

import msgspec
import torch

from omni_lab.engine.clock import StepClock
from omni_lab.engine.compiled import compile_graph, graph_file
from omni_lab.families import qwen3_omni
from omni_lab.families.graph_cache import failure_file, graph_folder
from omni_lab.families.plan import StagePlan
from omni_lab.kernels.library import KernelsMissing

ANSWER = "compiled, or the reason is written"


def main(plan: StagePlan, name: str, size: int) -> None:
    package = graph_file(graph_folder(plan), name, size)
    package.parent.mkdir(parents=True, exist_ok=True)
    with open(package.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another pipeline may be compiling the same graph
        if package.exists():
            return
        built = qwen3_omni.build_stage(msgspec.structs.replace(plan, step="eager"), StepClock())
        try:
            compile_graph(qwen3_omni.traced_step(built, name), size, package.parent)
        except KernelsMissing:
            return  # whoever opens the graphs says so; the next start tries again
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _write(failure_file(package), f"its graph cannot be compiled: {reason[0][:300]}")


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the compiler's processes must not hold these open
    os.dup2(2, 1)
    for job in jobs:
        main(*msgspec.json.decode(job, type=tuple[StagePlan, str, int]))
        print(ANSWER, file=answers, flush=True)
