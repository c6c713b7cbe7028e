"""The whole pipeline with the stateful vocoder: the oracle's samples, and memory that goes with its request."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from omni_lab.assemble import open_pipeline
from omni_lab.core import AudioChunk, Request, Sampling
from tests.oracle import load_oracle
from tests.pipelines import answers, experiment
from tests.test_code2wav import FRAME, TAIL

SETTING = (
    "executor=inline",
    "connector=in_process",
    "optimizations.stateful_code2wav=true",
    "optimizations.graphs.thinker=false",
    "optimizations.graphs.talker=false",
)


def test_an_abort_in_the_middle_frees_the_memory(nano: Path) -> None:
    setup = experiment(nano, *SETTING, "chunking.frames=3")

    words = [{"role": "user", "content": "What is the weather like today?"}]
    limits = {"thinker": Sampling(max_tokens=40), "talker": Sampling(repetition_penalty=1.05, max_tokens=60)}

    async def run() -> None:
        async with open_pipeline(setup) as pipeline:
            (code2wav,) = (worker for worker in pipeline.executor.workers if worker.stage.name == "code2wav")
            async with aclosing(pipeline.generate(Request("r", words, sampling=limits))) as events:
                while not isinstance(await anext(events), AudioChunk):
                    pass
                (sequence,) = code2wav.sequences.values()
                memory = weakref.ref(sequence.state.stream.memory)
                del sequence
            for _ in range(200):
                await asyncio.sleep(0.01)
                if not code2wav.sequences:
                    break
            assert not code2wav.sequences and memory() is None

    asyncio.run(run())


@pytest.mark.parametrize("async_chunk", [True, False], ids=["chunked", "whole"])
def test_the_pipeline_gives_the_oracle_its_samples(nano: Path, async_chunk: bool) -> None:
    setup = experiment(
        nano,
        *SETTING,
        f"optimizations.async_chunk={async_chunk}",
        "chunking.left_context=1",
        "chunking.frames=11",
        "stages.thinker.max_model_len=2048",
        "stages.talker.max_model_len=2048",
    )
    cases = [case for case in load_oracle() if case.wave is not None]
    (result,), _ = answers(setup, [case.request for case in cases], [7])
    assert max(len(case.codes) for case in cases) > 22  # three chunks
    for case, answer in zip(cases, result, strict=True):
        assert np.array_equal(answer.codes, case.codes), case.name
        assert len(answer.wave) == max(0, FRAME * len(case.codes) - TAIL), case.name
        assert np.abs(answer.wave - case.wave).max(initial=0.0) <= 1e-4, case.name
