"""Two clients, one server: vLLM-Omni's benchmark client and ours measure this project's server in turn.

`python -m tests.peers.agreement` (after `make peers`) prints the means of each repeat and their ratio.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from pathlib import Path

from omni_lab.core import Request, Sampling
from omni_lab.experiment import Experiment, load_experiment
from omni_lab.metrics.aggregate import repeat_figures
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.relative import paired_ratio
from omni_lab.peers import own_server
from omni_lab.workload.client import closed_loop
from omni_lab.workload.http_client import connect
from tests.peers.test_benchmark_client import CHECKPOINT, CONCURRENCY, COUNT, bench

REPEATS = 4
FIGURES = ("mean_audio_ttfp_ms", "mean_audio_rtf", "mean_e2el_ms")

SETTINGS = (
    f"model.checkpoint={CHECKPOINT}",
    "stages.talker.sampling={temperature: 0.0, repetition_penalty: 1.0, min_tokens: 61, max_tokens: 61}",
)
"""Every answer as long as the other: 20 tokens, which vLLM-Omni's client asks for, and 60 frames."""


def requests(experiment: Experiment, label: str) -> list[Request]:
    """What vLLM-Omni's client asks in `bench`."""
    talker = experiment.stages["talker"].sampling.model_dump()
    sampling = {"thinker": Sampling(min_tokens=20, max_tokens=20), "talker": Sampling(**talker)}
    texts = [f"Please answer the question number {index}." for index in range(COUNT)]
    return [
        Request(f"{label}-{index}", [{"role": "user", "content": text}], speaker="ethan", sampling=sampling)
        for index, text in enumerate(texts)
    ]


async def measure() -> list[tuple[dict, dict]]:
    """For each repeat the figures of our client and of theirs."""
    experiment = load_experiment(Path("experiments/full.yaml"), SETTINGS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        server = own_server.prepare(experiment, Path(folder))
        async with server.running(), connect(server.url) as target:
            await closed_loop(target.send, requests(experiment, "warm-up")[:CONCURRENCY], CONCURRENCY)
            await target.take_records()
            for repeat in range(REPEATS):
                sent = await closed_loop(target.send, requests(experiment, f"r{repeat}"), CONCURRENCY)
                await target.take_records()
                ours = repeat_figures(sent.rows, CONCURRENCY, SAMPLE_RATE, sent.cpu_s)
                theirs = await asyncio.to_thread(bench, server.url, Path(folder, str(repeat)))
                found.append((ours, theirs))
    return found


def main() -> None:
    found = asyncio.run(measure())
    for name in ("completed", "total_audio_duration_s", *FIGURES):
        ours, theirs = ([one.get(name, math.nan) for one in side] for side in zip(*found, strict=True))
        print(f"{name}: ours {statistics.fmean(ours):.4g}, theirs {statistics.fmean(theirs):.4g}")
        if name in FIGURES and (ratio := paired_ratio(theirs, ours)):
            print(f"  theirs / ours {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


if __name__ == "__main__":
    main()
