"""A server under several times the rate that it can sustain: those it accepts are served as before, the rest hear 429.

`make overload` runs it for a minute against the server's own process and prints what it measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from omni_lab import zoo
from omni_lab.experiment import Experiment, load_experiment
from omni_lab.metrics.records import RequestRow
from omni_lab.peers import own_server
from omni_lab.workload.arrivals import poisson_arrivals
from omni_lab.workload.client import closed_loop, open_loop
from omni_lab.workload.dataset import load_dataset
from omni_lab.workload.http_client import HttpTarget, connect
from omni_lab.workload.requests import make_request

SETTINGS = (
    f"model.checkpoint={zoo.path('nano')}",
    "stages.talker.sampling={temperature: 0.0, repetition_penalty: 1.0}",
    "workload.output={text_tokens: 40, codec_frames: 100}",
    "server={max_concurrent: 3, max_queue: 0}",
)
ALONE = 60
"""Requests that are sent one at a time, for the unloaded latency; the last of them, after the load, for recovery."""


@dataclass
class Overload:
    """What was measured. Latencies in ms."""

    factor: float
    seconds: float
    alone_ms: list[float] = field(default_factory=list)
    rate: float = 0.0
    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        bound = 2 * np.percentile(self.alone_ms, 99)
        if (worst := np.percentile(self.accepted_ms, 99)) > bound:
            yield f"99 % of the accepted requests had their first audio within {worst:.0f} ms, expected {bound:.0f}"
        if not self.refused_ms:
            yield "no request was refused: the load was not too much"
        if self.failed:
            yield f"{len(self.failed)} requests failed otherwise, such as {self.failed[0]}"
        if (after := np.median(self.after_ms)) > (before := np.percentile(self.alone_ms, 99)):
            yield f"after the load the first audio came after {after:.0f} ms, before it within {before:.0f} ms"

    def lines(self) -> Iterator[str]:
        sent = len(self.accepted_ms) + len(self.refused_ms) + len(self.failed)
        yield f"unloaded: first audio {_words(self.alone_ms)}"
        yield f"sustainable: {self.rate:.2f} requests/s; offered {sent / self.seconds:.2f} for {self.seconds:g} s"
        rate = len(self.accepted_ms) / self.seconds
        yield f"accepted {len(self.accepted_ms)} ({rate:.2f}/s): first audio {_words(self.accepted_ms)}"
        yield f"refused {len(self.refused_ms)}: 429 {_words(self.refused_ms)}"
        yield f"after the load, one at a time: first audio {_words(self.after_ms)}"


def _words(values_ms: list[float]) -> str:
    p50, p99 = np.percentile(values_ms, [50, 99]) if values_ms else (np.nan, np.nan)
    return f"{p50:.0f} ms, p99 {p99:.0f} ms"


def first_audio_ms(row: RequestRow) -> float:
    return (row.audio_ns[0] - row.sent_ns) / 1e6


async def overload(experiment: Experiment, factor: float, seconds: float) -> Overload:
    """Measures the experiment's server in a process of its own."""
    found = Overload(factor, seconds)
    prompts = load_dataset(experiment.workload).take(256, 0)

    def requests(count: int, label: str) -> list:
        return [make_request(experiment, prompts[i % len(prompts)], i, label) for i in range(count)]

    async def alone(target: HttpTarget, count: int, label: str) -> list[float]:
        sent = await closed_loop(target.send, requests(count, label), 1)
        await target.take_records()
        return [first_audio_ms(row) for row in sent.rows if not row.error]

    with tempfile.TemporaryDirectory() as folder:
        server = own_server.prepare(experiment, Path(folder))
        async with server.running(), connect(server.url) as target:
            slots = experiment.server.max_concurrent
            await closed_loop(target.send, requests(4 * slots, "warmup"), slots)
            await target.take_records()
            found.alone_ms = await alone(target, ALONE, "alone")
            steady = await closed_loop(target.send, requests(24 * slots, "steady"), slots)
            first, last = min(row.sent_ns for row in steady.rows), max(row.end_ns for row in steady.rows)
            found.rate = len(steady.rows) / (last - first) * 1e9
            count = round(factor * found.rate * seconds)
            arrivals = poisson_arrivals(count, factor * found.rate, 0)
            sent = await open_loop(target.send, requests(count, "overload"), arrivals)
            found.after_ms = await alone(target, ALONE // 4, "after")
            for row in sent.rows:
                if not row.error:
                    found.accepted_ms.append(first_audio_ms(row))
                elif row.error.startswith("HTTP 429"):
                    found.refused_ms.append((row.end_ns - row.sent_ns) / 1e6)
                else:
                    found.failed.append(row.error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    experiment = load_experiment(Path("experiments/full.yaml"), [*SETTINGS, *options.set])
    found = asyncio.run(overload(experiment, options.factor, options.seconds))
    print(*found.lines(), sep="\n")
    problems = list(found.problems())
    print(*problems, sep="\n", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
