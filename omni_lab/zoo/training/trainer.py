"""The loop in which each network is trained: a budget of time, averaged weights, a state that survives a kill."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

WARM_UP = 200
DECAY = 0.35
"""The last part of the budget, in which the learning rate falls."""
LOG_SECONDS, SAVE_SECONDS = 20, 120


class Task(Protocol):
    """What is trained, and on what."""

    name: str
    network: torch.nn.Module
    learning_rate: float

    def losses(self, chance: np.random.Generator, progress: float) -> dict[str, torch.Tensor]:
        """One batch: "loss", which is minimised, and whatever else is worth a curve; scalars.

        `progress` is the part of the training that is done.
        """


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(task: Task, folder: Path, budget: float, portion: float, say: Callable[[str], None]) -> None:
    """Train until `portion` of `budget` seconds of computing is used, with what earlier calls have used.

    On a CPU the seconds are the processor's, so that a run with low priority learns as much as one alone. State is
    in FOLDER/NAME.pt, replaced whole; curves are appended to FOLDER/losses.jsonl. Batches follow from the number of
    the step; a run that was killed goes on from what was saved last, SAVE_SECONDS before or little more.

    Raises RuntimeError, before anything is saved, if the loss is not finite.
    """
    task.network.to(device()).train()
    trained = [parameter for parameter in task.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    average = {name: value.detach().clone() for name, value in task.network.state_dict().items()}
    file, step, used = folder / f"{task.name}.pt", 0, 0.0
    if file.exists():
        state = torch.load(file, map_location=device())
        task.network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        average, step, used = state["average"], state["step"], state["seconds"]

    def save() -> None:
        content = {
            "network": task.network.state_dict(),
            "average": average,
            "optimizer": optimizer.state_dict(),
            "step": step,
            "seconds": used,
        }
        torch.save(content, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    end = portion * budget
    if used >= end:
        say(f"{task.name}: has had its {duration(end)}; more --hours train on")
    began, began_used = time.perf_counter(), used
    logged, saved, clock, sums, count = used, used, _clock(), {}, 0
    while used < end:
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * _schedule(step, used / budget)
        losses = task.losses(np.random.default_rng([step, zlib.crc32(task.name.encode())]), used / budget)
        optimizer.zero_grad()
        losses["loss"].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        _move_average(average, task.network, min(0.999, step / (step + 10)))
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.detach()
        count += 1
        now = _clock()
        used, clock = used + now - clock, now
        if used - logged >= LOG_SECONDS or used >= end:
            means = {name: round(float(value) / count, 5) for name, value in sums.items()}
            line = {"stage": task.name, "step": step, "seconds": round(used, 3), **means}
            with (folder / "losses.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            left = (time.perf_counter() - began) / (used - began_used) * (end - used)
            curves = " ".join(f"{name} {value:.3f}" for name, value in means.items())
            say(f"{task.name}: step {step}, {used / budget:.1%} of its budget, {duration(left)} left: {curves}")
            if not math.isfinite(means["loss"]):
                raise RuntimeError(f"{task.name}: the loss is {means['loss']}; delete {file} to train {task.name} anew")
            logged, sums, count = used, {}, 0
            if used - saved >= SAVE_SECONDS or used >= end:
                save()
                saved = used


def duration(seconds: float) -> str:
    hours, minutes = divmod(max(0, round(seconds / 60)), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def averaged(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The averaged weights of a network, on the CPU. Raises FileNotFoundError before its first training."""
    return torch.load(folder / f"{name}.pt", map_location="cpu")["average"]


def _clock() -> float:
    if device().type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _schedule(step: int, progress: float) -> float:
    return min(1.0, (step + 1) / WARM_UP, max(0.0, 1 - progress) / DECAY + 0.01)


@torch.no_grad()
def _move_average(average: dict[str, torch.Tensor], network: torch.nn.Module, keep: float) -> None:
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - keep)
