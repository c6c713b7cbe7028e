"""The client's own ceiling: `python -m omni_lab.bench --echo` measures the client against prepared answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from omni_lab.core import Request, Sampling
from omni_lab.workload.client import closed_loop
from omni_lab.workload.http_client import HttpTarget, connect
from omni_lab.workload.wire import server_sent_events

PAUSE_S = 0.02
"""Between the events of an answer when latency is measured: a stage that gives 50 tokens a second."""


@dataclass(frozen=True)
class Ceiling:
    """The client at one concurrency. `added_ms` is from the write of an event to the time that the client notes."""

    concurrency: int
    requests_per_s: float
    busy_share: float
    added_ms_median: float
    added_ms_p99: float


def measure(argv: Sequence[str]) -> int:
    """The command; prints a line for each concurrency."""
    parser = argparse.ArgumentParser(prog="omni_lab.bench --echo", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=300, help="at each concurrency")
    options = parser.parse_args(argv)
    print("concurrency  most requests/s  client busy  added latency ms, median   p99")
    for one in ceilings(options.concurrency, options.requests):
        print(
            f"{one.concurrency:11}  {one.requests_per_s:15.1f}  {one.busy_share:11.2f}"
            f"  {one.added_ms_median:24.3f}  {one.added_ms_p99:4.2f}"
        )
    return 0


def ceilings(concurrencies: Sequence[int], requests: int) -> Iterator[Ceiling]:
    """For each concurrency: answers as fast as they can be written, then answers at the pace of a real stage."""
    for concurrency in concurrencies:
        with echo_server(0.0) as url:
            rate, busy, _ = asyncio.run(_load(url, concurrency, requests))
        with echo_server(PAUSE_S) as url:
            _, _, added = asyncio.run(_load(url, concurrency, max(concurrency, requests // 10)))
        median, p99 = (float(np.percentile(added, percent)) for percent in (50, 99))
        yield Ceiling(concurrency, rate, busy, median, p99)


async def _load(url: str, concurrency: int, count: int) -> tuple[float, float, list[float]]:
    """Requests a second, the client's processor time a second, and the ms by which each event was noted late."""
    async with connect(url, model="echo") as target:
        await closed_loop(target.send, chat_requests("warm-up", concurrency), concurrency)
        target.unread.clear()
        sent = await closed_loop(target.send, chat_requests("echo", count), concurrency)
        added = list(_added_ms(target))
        await target.take_records()
    if failed := [row.error for row in sent.rows if row.error]:
        raise RuntimeError(f"{len(failed)} of {count} echoes failed: {failed[0]}")
    seconds = (max(row.end_ns for row in sent.rows) - min(row.sent_ns for row in sent.rows)) / 1e9
    return count / seconds, sent.cpu_s / seconds, added


def _added_ms(target: HttpTarget) -> Iterator[float]:
    for _, reads, _ in target.unread:
        for time_ns, data in server_sent_events(reads):
            if data != b"[DONE]":
                yield (time_ns - int(json.loads(data)["sent_ns"])) / 1e6


def chat_requests(label: str, count: int) -> list[Request]:
    """Requests for an echo server, which answers all of them alike."""
    sampling = {"thinker": Sampling(), "talker": Sampling()}
    messages = [{"role": "user", "content": "Please answer the question of the user."}]
    return [Request(f"{label}-{index}", messages, sampling=sampling) for index in range(count)]


@contextmanager
def echo_server(pause_s: float) -> Iterator[str]:
    """The address of an echo server in a process of its own, so that it does not compute in the client's time.

    `pause_s` lies between the events of an answer.
    """
    command = [sys.executable, "-m", "omni_lab.workload.echo_server", str(pause_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
