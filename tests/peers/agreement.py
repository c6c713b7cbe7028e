"""Two clients, one server: vLLM-Omni's benchmark client and ours measure this project's server in turn.

`python -m tests.peers.agreement` (after `make peers`) prints what each client measured, what the server itself measured
of the same requests, and how they compare.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Awaitable
from pathlib import Path

import aiohttp

from omni_lab.core import Request, Sampling
from omni_lab.experiment import load_experiment
from omni_lab.metrics.aggregate import repeat_figures
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.relative import paired_ratio
from omni_lab.peers import own_server
from omni_lab.workload.client import closed_loop
from omni_lab.workload.http_client import HttpTarget, connect
from tests.peers.test_benchmark_client import CHECKPOINT, CONCURRENCY, COUNT, SYSTEM_PROMPT, bench

REPEATS = 4
FIGURES = {
    "mean_audio_ttfp_ms": ("omni_audio_ttfp_seconds", 1e3),
    "mean_audio_rtf": ("omni_audio_rtf", 1.0),
    "mean_e2el_ms": ("omni_e2e_seconds", 1e3),
}
"""Each with the server's own histogram of it, and units of the one in a unit of the other."""

TALKER = {"temperature": 0.0, "repetition_penalty": 1.0, "min_tokens": 61, "max_tokens": 61}
"""Every answer as long as the other: 20 tokens, which vLLM-Omni's client asks for, and 60 frames."""

SETTINGS = (f"model.checkpoint={CHECKPOINT}", f"stages.talker.sampling={TALKER}")

Sides = dict[str, dict]
"""Figures by who measured: "ours", "server of ours", "theirs", "server of theirs"."""


def requests(label: str) -> list[Request]:
    """What vLLM-Omni's client asks in `bench`."""
    sampling = {"thinker": Sampling(min_tokens=20, max_tokens=20), "talker": Sampling(**TALKER)}
    system = {"role": "system", "content": SYSTEM_PROMPT}
    users = [{"role": "user", "content": f"Please answer the question number {index}."} for index in range(COUNT)]
    return [
        Request(f"{label}-{index}", [system, user], speaker="ethan", sampling=sampling)
        for index, user in enumerate(users)
    ]


async def ours(target: HttpTarget, label: str) -> dict:
    sent = await closed_loop(target.send, requests(label), CONCURRENCY)
    await target.take_records()
    return repeat_figures(sent.rows, CONCURRENCY, SAMPLE_RATE, sent.cpu_s)


async def sums(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of each of the server's histograms."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#")]
    shown = {name: float(value) for name, value in lines}
    return {
        name: (unit * shown[f"{histogram}_sum"], shown[f"{histogram}_count"])
        for name, (histogram, unit) in FIGURES.items()
    }


async def both(url: str, load: Awaitable[dict]) -> tuple[dict, dict]:
    """What a client measured, and what the server measured of the same requests."""
    before = await sums(url)
    client = await load
    after = await sums(url)
    server = {name: (after[name][0] - before[name][0]) / (after[name][1] - before[name][1]) for name in FIGURES}
    return client, server


async def measure() -> list[Sides]:
    """One map a repeat."""
    experiment = load_experiment(Path("experiments/full.yaml"), SETTINGS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        server = own_server.prepare(experiment, Path(folder))
        async with server.running(), connect(server.url) as target:
            await ours(target, "warm-up")
            for repeat in range(REPEATS):
                our, of_ours = await both(server.url, ours(target, f"r{repeat}"))
                load = asyncio.to_thread(bench, server.url, Path(folder, str(repeat)))
                their, of_theirs = await both(server.url, load)
                found.append({"ours": our, "server of ours": of_ours, "theirs": their, "server of theirs": of_theirs})
    return found


def main() -> None:
    found = asyncio.run(measure())
    for side in ("ours", "theirs"):
        print(f"{side}: completed {[one[side]['completed'] for one in found]}")
    for name in FIGURES:
        sides = {side: [one[side][name] for one in found] for side in found[0]}
        print(name, {side: round(statistics.fmean(values), 4) for side, values in sides.items()})
        for over, under in (("ours", "server of ours"), ("theirs", "server of theirs"), ("theirs", "ours")):
            ratio = paired_ratio(sides[over], sides[under])
            print(f"  {over} / {under}: {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


if __name__ == "__main__":
    main()
