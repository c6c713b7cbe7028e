"""`python -m omni_lab.roofline [CHECKPOINT]`: how far each stage's steps are from what this processor could do.

The floor of a step is the longer of two times: its arithmetic at the rate of a large matrix product, and its reading
at the rate at which a matrix of the same size is read. Both rates are measured here, on one thread, as a worker has.
The steps are those of the real pipeline, all stages in this process, while a number of requests is in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from omni_lab import zoo
from omni_lab.assemble import open_pipeline
from omni_lab.core import PipelineError
from omni_lab.environment import describe_environment
from omni_lab.experiment import Experiment
from omni_lab.metrics.records import RequestRow, StepRow
from omni_lab.models.qwen3_omni.config import OmniConfig, parse_config
from omni_lab.models.qwen3_omni.weights import read_config
from omni_lab.models.qwen3_omni.work import Work, code2wav_frames, talker_frame, thinker_step
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.workload.client import closed_loop
from omni_lab.workload.dataset import Prompt, load_dataset
from omni_lab.workload.requests import make_request
from omni_lab.workload.target import PipelineTarget

STAGES = {"thinker": "decode", "talker": "decode", "code2wav": "vocode"}
"""The stages, and the kind of step that is looked at: no prefill."""

TEXT_TOKENS, FRAMES = 40, 50
NUMBER_BYTES = 4
SIDE = 512
"""Rows and columns of the matrices whose product gives the rate."""
TRIES = 30


@dataclass(frozen=True, slots=True)
class Floor:
    """The steps of one stage while `in_flight` requests ran: means over its steps.

    `share` is floor / measured; `bound` says which of arithmetic and reading is the longer.
    """

    stage: str
    in_flight: int
    steps: int
    mean_batch: float
    gflop: float
    mbyte: float
    floor_ms: float
    step_ms: float
    share: float
    bound: str


def matrix_rate() -> float:
    """Floating-point operations a second of a SIDE x SIDE x SIDE product, the best of TRIES."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return 2 * SIDE**3 / _best(lambda: torch.mm(left, right))


def read_rate(size: float) -> float:
    """Bytes a second at which a matrix of `size` bytes is read, times a vector, again and again: the best of TRIES.

    A matrix that fits into the processor's caches is read from there, as the weights of a small stage are.
    """
    matrix = torch.randn(max(1, round(size / NUMBER_BYTES / SIDE)), SIDE)
    vector = torch.randn(SIDE)
    return matrix.nbytes / _best(lambda: torch.mv(matrix, vector))


def _best(action: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def floors(
    config: OmniConfig, in_flight: int, steps: Sequence[StepRow], requests: Sequence[RequestRow], flops: float
) -> list[Floor]:
    """A floor for each stage that took steps; `flops` is the matrix rate."""
    prompt = statistics.fmean(row.prompt_tokens or 0 for row in requests)
    found = []
    for stage, kind in STAGES.items():
        own = [row for row in steps if (row.stage, row.kind) == (stage, kind) and row.tokens]
        if not own:
            continue
        works = [_work(config, row, prompt) for row in own]
        rate = read_rate(NUMBER_BYTES * statistics.fmean(work.numbers for work in works))
        reckoning = [2 * work.macs / flops for work in works]
        reading = [NUMBER_BYTES * work.numbers / rate for work in works]
        floor_s = statistics.fmean(map(max, reckoning, reading))
        step_s = statistics.fmean(row.end_ns - row.start_ns for row in own) / 1e9
        found.append(
            Floor(
                stage,
                in_flight,
                len(own),
                mean_batch=statistics.fmean(row.batch for row in own),
                gflop=statistics.fmean(2 * work.macs for work in works) / 1e9,
                mbyte=statistics.fmean(NUMBER_BYTES * work.numbers for work in works) / 1e6,
                floor_ms=1e3 * floor_s,
                step_ms=1e3 * step_s,
                share=floor_s / step_s,
                bound="arithmetic" if sum(reckoning) > sum(reading) else "reading",
            )
        )
    return found


def _work(config: OmniConfig, step: StepRow, prompt_tokens: float) -> Work:
    if step.stage == "thinker":
        return thinker_step(config.thinker.text, step.batch, prompt_tokens + TEXT_TOKENS / 2)
    if step.stage == "talker":
        return talker_frame(config.talker, step.batch, prompt_tokens + FRAMES / 2)
    return code2wav_frames(config.code2wav, step.tokens)


async def measure(experiment: Experiment, flops: float) -> list[Floor]:
    """Floors at each concurrency of the experiment. Raises PipelineError if the pipeline cannot start."""
    config = parse_config(read_config(zoo.resolve(experiment.model.checkpoint)))
    prompts = load_dataset(experiment.workload)
    async with open_pipeline(experiment) as pipeline:
        found = []
        for count in experiment.workload.loads:
            taken = prompts.take(count, experiment.workload.seed)
            await _send(pipeline, experiment, taken, "warm-up")
            await pipeline.take_records()
            rows = await _send(pipeline, experiment, taken, "measured")
            measured = await pipeline.take_records()
            found += floors(config, count, measured.steps, rows, flops)
        return found


async def _send(pipeline: Pipeline, experiment: Experiment, prompts: list[Prompt], label: str) -> list[RequestRow]:
    name = f"{label}-{len(prompts)}"
    requests = [make_request(experiment, prompt, index, name) for index, prompt in enumerate(prompts)]
    rows = (await closed_loop(PipelineTarget(pipeline).send, requests, len(requests))).rows
    for row in rows:
        if row.error:
            raise PipelineError(f"request {row.id} failed: {row.error}")
    return rows


def table(found: Sequence[Floor]) -> str:
    """One line for each stage and concurrency."""
    lines = [
        f"{'stage':<10}{'in flight':>10}{'batch':>7}{'GFLOP':>10}{'MB read':>9}{'floor ms':>10}{'step ms':>10}"
        f"{'share':>8}  bound by"
    ]
    for one in sorted(found, key=lambda one: list(STAGES).index(one.stage)):
        lines.append(
            f"{one.stage:<10}{one.in_flight:>10}{one.mean_batch:>7.1f}{one.gflop:>10.4f}{one.mbyte:>9.2f}"
            f"{one.floor_ms:>10.3f}{one.step_ms:>10.3f}{one.share:>8.1%}  {one.bound}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="omni_lab.roofline", description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("checkpoint", nargs="?", default="nano", help="an embedded name or a directory (nano)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="what to show (all)")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N", help="(1 4 16 64)")
    parser.add_argument("--eager", action="store_true", help="steps that are not captured")
    parser.add_argument("--json", action="store_true", help="rates and floors as JSON")
    options = parser.parse_args(arguments)
    if min(options.in_flight) < 1 or len(set(options.in_flight)) < len(options.in_flight):
        parser.error(f"--in-flight: expected different numbers of at least 1, got {options.in_flight}")
    torch.set_num_threads(1)
    try:
        zoo.resolve(options.checkpoint)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        flops = matrix_rate()
        found = asyncio.run(measure(_experiment(options), flops))
    except PipelineError as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    found = [one for one in found if one.stage in options.stages]
    if options.json:
        rates = {"environment": describe_environment(), "matrix_gflops": flops / 1e9}
        print(json.dumps(rates | {"floors": [asdict(one) for one in found]}, indent=1))
    else:
        print(f"one thread: {flops / 1e9:.1f} GFLOP/s in a product of {SIDE} x {SIDE} matrices, float32\n")
        print(table(found))
    return 0


def _experiment(options: argparse.Namespace) -> Experiment:
    """All layers in one process, on fixed work: greedy, TEXT_TOKENS and FRAMES long."""
    toggles: dict[str, object] = {"stateful_code2wav": True}
    if options.eager:
        toggles["graphs"] = dict.fromkeys(STAGES, False)
    return Experiment(
        name="roofline",
        model={"checkpoint": str(Path(options.checkpoint))},
        executor="inline",
        connector="in_process",
        stages={"talker": {"sampling": {"temperature": 0.0, "repetition_penalty": 1.0}}},
        optimizations=toggles,
        workload={
            "concurrency": options.in_flight,
            "output": {"text_tokens": TEXT_TOKENS, "codec_frames": FRAMES},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
