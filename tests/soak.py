"""A long run under trouble, in which clients leave and workers are killed: what must hold meanwhile and at the end.

`make soak` runs it in full, tests/test_soak.py for half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import psutil

from omni_lab import zoo
from omni_lab.assemble import open_pipeline
from omni_lab.core import Request, StageError, Unavailable
from omni_lab.experiment import Experiment
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.workload.dataset import load_dataset
from omni_lab.workload.requests import make_request
from tests.pipelines import Answer, ask, ask_all, experiment

DISTINCT = 48
"""Requests whose answers are known from a run without trouble; the others repeat them."""

SHORT = (
    "workload.output={text_tokens: 8, codec_frames: 8}",
    "stages.thinker.sampling={temperature: 0.0}",
    "stages.talker.sampling={temperature: 0.0, repetition_penalty: 1.0}",
    "stages.talker.replicas=2",
    "stages.talker.max_num_seqs=16",  # as many rows as its share: while the other is down it needs no more memory
)


@dataclass(frozen=True)
class Trouble:
    """How much of it. `warmup` requests end after a process began before its memory is first looked at.

    `growth` is the share of that memory that it may have gained at the end.
    """

    requests: int
    concurrency: int
    kills: int
    warmup: int
    aborts: float = 0.2
    growth: float = 0.05
    seed: int = 0


@dataclass
class Level:
    """Resident bytes and open descriptors of one process, after its warm-up and at the end."""

    began: int
    after_warmup: tuple[int, int] | None = None
    end: tuple[int, int] | None = None


@dataclass
class Report:
    answered: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    killed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    levels: dict[str, Level] = field(default_factory=dict)

    def problems(self, trouble: Trouble) -> list[str]:
        problems = list(self.wrong)
        if self.answered + self.aborted + self.failed != trouble.requests:
            problems.append(f"{self.answered} answered, {self.aborted} aborted, {self.failed} failed")
        if self.failed > len(self.killed) * trouble.concurrency:
            problems.append(f"{self.failed} requests failed with {len(self.killed)} workers")
        for name, level in self.levels.items():
            if level.after_warmup is None or level.end is None:
                continue
            (memory, descriptors), (memory_at_end, descriptors_at_end) = level.after_warmup, level.end
            if memory_at_end > (1 + trouble.growth) * memory:
                problems.append(f"{name}: memory grew from {memory / 1e6:.1f} to {memory_at_end / 1e6:.1f} MB")
            if descriptors != descriptors_at_end:
                problems.append(f"{name}: {descriptors} descriptors became {descriptors_at_end}")
        return problems

    def lines(self) -> Iterator[str]:
        yield f"{self.answered} answered, {self.aborted} aborted by their clients, {self.failed} failed with a worker"
        yield f"{self.refused} times refused and asked again; killed: {', '.join(self.killed)}"
        for name, level in self.levels.items():
            if level.after_warmup and level.end:
                memory, end = level.after_warmup[0] / 1e6, level.end[0] / 1e6
                yield f"{name}: {memory:.1f} MB after warm-up, {end:.1f} MB at the end ({end / memory - 1:+.1%})"


class Soak:
    """One run on an open pipeline."""

    def __init__(self, pipeline: Pipeline, requests: list[Request], trouble: Trouble) -> None:
        self.pipeline = pipeline
        self.requests = requests
        self.trouble = trouble
        self.report = Report()
        self.draws = random.Random(trouble.seed)
        self.named = named_memory(os.getpid())
        self.done = 0

    async def run(self) -> Report:
        trouble, report = self.trouble, self.report
        self.expected = await ask_all(self.pipeline, self.requests, trouble.concurrency)
        self._look()
        numbers = iter(range(trouble.requests))
        every = trouble.requests // (trouble.kills + 1)
        leaves = [self.draws.random() < trouble.aborts for _ in range(trouble.requests)]

        async def client() -> None:
            for number in numbers:
                await (self._leave(number) if leaves[number] else self._ask(number))
                self.done += 1
                self._look()
                if self.done % every == 0 and len(report.killed) < trouble.kills:
                    self._kill()
                if self.done % 64 == 0:
                    await self.pipeline.take_records()  # as whoever watches a server does

        await asyncio.gather(*(client() for _ in range(trouble.concurrency)))
        while self.pipeline.down:
            await asyncio.sleep(0.05)
        for worker, counts in (await self.pipeline.take_records()).counters.items():
            if counts["open_sequences"] or counts["open_streams"]:
                report.wrong.append(f"{worker} still holds {counts}")
        if self.pipeline.requests or any(self.pipeline.load.values()):
            report.wrong.append(f"the pipeline still holds {list(self.pipeline.requests)}")
        for name, pid in self._processes():
            if more := named_memory(pid) - self.named:  # this process may have had its own before
                report.wrong.append(f"{name} has {more}")
        self._look(end=True)
        return report

    async def _ask(self, number: int) -> None:
        request = self._request(number)
        while True:
            try:
                answer = await ask(self.pipeline, request)
            except Unavailable:
                self.report.refused += 1
                while self.pipeline.unready and not self.pipeline.broken:
                    await asyncio.sleep(0.05)
            except StageError as error:
                self.report.failed += 1
                if not any(str(error).startswith(f"{killed}, ") for killed in self.report.killed):
                    self.report.wrong.append(str(error))
                return
            else:
                self.report.answered += 1
                if not same(answer, self.expected[number % len(self.expected)]):
                    self.report.wrong.append(f"request {number}: another answer than without trouble")
                return

    async def _leave(self, number: int) -> None:
        events = self.draws.randrange(8)
        try:
            async with aclosing(self.pipeline.generate(self._request(number))) as stream:
                for _ in range(events):
                    await anext(stream)
        except (StageError, Unavailable):
            pass  # it was about to leave anyway
        self.report.aborted += 1

    def _request(self, number: int) -> Request:
        return dataclasses.replace(self.requests[number % len(self.requests)], id=f"soak-{number}")

    def _kill(self) -> None:
        ends = [end for end in self.pipeline.executor.ready if (end.stage, end.replica) not in self.pipeline.down]
        end = self.draws.choice(sorted(ends, key=str))
        self.pipeline.executor.processes[end].kill()
        self.report.killed.append(f"stage {end.stage}, replica {end.replica}")

    def _processes(self) -> list[tuple[str, int]]:
        executor = self.pipeline.executor
        workers = {end: executor.processes[end].pid for end in executor.ready}
        return [("client", os.getpid()), *((f"{end} {pid}", pid) for end, pid in workers.items())]

    def _look(self, end: bool = False) -> None:
        """Note memory and descriptors of every process that has done its warm-up."""
        for name, pid in self._processes():
            level = self.report.levels.setdefault(name, Level(self.done))
            if end:
                level.end = measure(pid)
            elif level.after_warmup is None and self.done - level.began >= self.trouble.warmup:
                level.after_warmup = measure(pid)


def measure(pid: int) -> tuple[int, int]:
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds()


def same(answer: Answer, expected: Answer) -> bool:
    return answer.text_ids == expected.text_ids and np.array_equal(answer.codes, expected.codes)


async def soak(setup: Experiment, trouble: Trouble) -> tuple[Report, list[str]]:
    """The report and what is wrong with it, left-overs of the whole pipeline in this process included."""
    before = left_behind()
    prompts = load_dataset(setup.workload).take(DISTINCT, 0)
    requests = [make_request(setup, prompt, index, "known") for index, prompt in enumerate(prompts)]
    requests = [dataclasses.replace(request, return_codes=True) for request in requests]
    async with open_pipeline(setup) as pipeline:
        report = await Soak(pipeline, requests, trouble).run()
    problems = report.problems(trouble)
    if (after := left_behind()) != before:
        problems.append(f"descriptors and children {before} became {after}")
    return report, problems


def left_behind() -> tuple[int, int]:
    """Descriptors and children of this process."""
    process = psutil.Process()
    return process.num_fds(), len(process.children())


def named_memory(pid: int) -> set[str]:
    """Shared memory of a process that has a name and so could outlive it. (Other programs have their own meanwhile.)"""
    return {each.path for each in psutil.Process(pid).memory_maps() if each.path.startswith("/dev/shm/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    trouble = Trouble(**vars(parser.parse_args()))
    began = time.monotonic()
    report, problems = asyncio.run(soak(experiment(zoo.path("nano"), *SHORT), trouble))
    print(*report.lines(), f"{time.monotonic() - began:.0f} s", sep="\n")
    print(*problems, sep="\n", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
