"""Running requests through real pipelines, for tests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omni_lab.assemble import open_pipeline
from omni_lab.core import AudioChunk, Finished, Request, TextDelta
from omni_lab.experiment import Experiment, load_experiment
from omni_lab.pipeline.orchestrator import Measured, Pipeline

BASE = Path(__file__).parent.parent / "experiments" / "async_output.yaml"


@dataclass
class Answer:
    """All that a client got for one request."""

    text: str = ""
    text_ids: list[int] = field(default_factory=list)
    chunks: list[AudioChunk] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def codes(self) -> np.ndarray:
        parts = [chunk.codes for chunk in self.chunks if chunk.codes is not None]
        return np.concatenate(parts) if parts else np.zeros((0, 16), np.int64)

    @property
    def wave(self) -> np.ndarray:
        return np.concatenate([chunk.samples for chunk in self.chunks]) if self.chunks else np.zeros(0, np.float32)


EAGER = "optimizations.graphs={thinker: false, talker: false, code2wav: false}"
"""Compiling graphs takes minutes: only the tests about them ask for them, later in `overrides`."""

SMALL = """
name: small
model: {checkpoint: nano}
executor: inline
connector: in_process
optimizations: {graphs: {thinker: false, talker: false, code2wav: false}}
"""
"""The beginning of an experiment file that starts in a second."""


def experiment(checkpoint: Path | str, *overrides: str) -> Experiment:
    return load_experiment(BASE, [f"model.checkpoint={checkpoint}", EAGER, *overrides])


async def ask(pipeline: Pipeline, request: Request) -> Answer:
    answer = Answer()
    async with aclosing(pipeline.generate(request)) as events:
        async for event in events:
            match event:
                case TextDelta():
                    answer.text += event.text
                    answer.text_ids += event.token_ids
                case AudioChunk():
                    answer.chunks.append(event)
                case Finished():
                    answer.finished = event
    return answer


async def ask_all(pipeline: Pipeline, requests: Iterable[Request], concurrency: int) -> list[Answer]:
    """Answers in the order of the requests, with at most `concurrency` in flight."""
    slots = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Answer:
        async with slots:
            return await ask(pipeline, request)

    return list(await asyncio.gather(*(one(request) for request in requests)))


def answers(
    setup: Experiment,
    requests: Iterable[Request],
    concurrency: Iterable[int] = (1,),
    effective: dict[str, Any] | None = None,
) -> tuple[list[list[Answer]], Measured]:
    """The answers at each concurrency, from one pipeline, and what its workers measured; fills `effective`."""

    async def run() -> tuple[list[list[Answer]], Measured]:
        async with open_pipeline(setup) as pipeline:
            if effective is not None:
                effective.update(pipeline.effective)
            results = [
                await ask_all(pipeline, [dataclasses.replace(r, id=f"{r.id}-{c}") for r in requests], c)
                for c in concurrency
            ]
            return results, await pipeline.take_records()

    requests = list(requests)
    return asyncio.run(run())
