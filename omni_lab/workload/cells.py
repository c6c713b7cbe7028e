"""Runs the cells of an experiment: opens the pipelines, sends the requests, hands the figures to the run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, Protocol

from omni_lab.assemble import open_pipeline
from omni_lab.core import Request
from omni_lab.experiment import Experiment
from omni_lab.metrics.aggregate import add_counts, repeat_figures, stage_figures
from omni_lab.metrics.records import RequestRow
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.results import RunDirectory, request_line
from omni_lab.workload.arrivals import poisson_arrivals
from omni_lab.workload.client import Sent, closed_loop, open_loop
from omni_lab.workload.dataset import Dataset, Prompt
from omni_lab.workload.plan import Unit
from omni_lab.workload.requests import make_request

SAMPLE_RATE = 24_000
"""Hz of all audio that the pipeline gives."""


class Progress(Protocol):
    """Shows that something goes on: a bar of `total` ticks with a title."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[Callable[[], object]]: ...


async def run_units(
    units: Sequence[Unit], datasets: dict[str, Dataset], directory: RunDirectory, progress: Progress
) -> None:
    """Runs the units one after the other; the pipeline starts anew where the configuration changes.

    `datasets`: one for each configuration's name. Each unit is in the directory when the next one starts.
    Raises PipelineError when a pipeline cannot start or breaks.
    """
    opened: Experiment | None = None
    async with AsyncExitStack() as stack:
        for unit in units:
            if unit.configuration is not opened:
                await stack.aclose()
                opened = unit.configuration
                pipeline = await _start(opened, stack, progress)
                directory.record["configurations"][opened.name]["effective"] = pipeline.effective
            await _run_unit(pipeline, unit, datasets[opened.name], directory, progress)


async def _start(experiment: Experiment, stack: AsyncExitStack, progress: Progress) -> Pipeline:
    stages = experiment.stages.values()
    one_worker = all(stage.engine == "transformers" for stage in stages)
    workers = 1 if one_worker else sum(stage.replicas for stage in stages)

    def compiling(graphs: int) -> AbstractContextManager[Callable[[], object]]:
        return progress(f"{experiment.name}: compiling captured steps, once", graphs)

    with progress(f"{experiment.name}: loading", workers) as tick:
        return await stack.enter_async_context(open_pipeline(experiment, lambda worker, facts: tick(), compiling))


async def _run_unit(
    pipeline: Pipeline, unit: Unit, dataset: Dataset, directory: RunDirectory, progress: Progress
) -> None:
    experiment, workload = unit.configuration, unit.configuration.workload
    count = workload.prompts(unit.concurrency)
    warmup = (unit.concurrency or 1) if workload.warmup is None else workload.warmup
    prompts = dataset.take(count + warmup, workload.seed)
    if warmup:
        requests = _requests(experiment, prompts[count:], f"{unit.label}-warmup")
        with progress(f"{unit.label}: warm-up", warmup) as tick:
            await closed_loop(pipeline, requests, unit.concurrency or warmup, done=tick)
    before = await pipeline.take_records()  # what belongs to the warm-up
    requests = _requests(experiment, prompts[:count], unit.label)
    keep_audio = experiment.results.save_audio if unit.repeat == 0 else 0
    with progress(unit.label, count) as tick:
        sent = await _send(pipeline, requests, unit, keep_audio, tick)
    measured = await pipeline.take_records()
    fixed_frames = workload.output.codec_frames is not None
    figures = repeat_figures(sent.rows, unit.concurrency, SAMPLE_RATE, sent.cpu_s, fixed_frames)
    figures["stages"] = stage_figures(measured.steps, figures["duration"], pipeline.replicas)
    add_counts(figures["stages"], before.counters, measured.counters)
    figures["lost_steps"] = measured.lost_steps
    for row, request, prompt in zip(sent.rows, requests, prompts, strict=False):
        row.labels = _labels(pipeline, experiment, row, request, prompt, directory.save_audio(row, SAMPLE_RATE))
    lines = [request_line(row, SAMPLE_RATE, unit.concurrency) for row in sent.rows]
    directory.add(unit.key, figures, lines, measured.steps, measured.chunks)


def _requests(experiment: Experiment, prompts: Sequence[Prompt], label: str) -> list[Request]:
    return [make_request(experiment, prompt, index, label) for index, prompt in enumerate(prompts)]


async def _send(
    pipeline: Pipeline, requests: list[Request], unit: Unit, keep_audio: int, tick: Callable[[], object]
) -> Sent:
    arrivals = unit.configuration.workload.arrivals
    if arrivals is None:
        return await closed_loop(pipeline, requests, unit.concurrency or 1, keep_audio, tick)
    times = poisson_arrivals(len(requests), arrivals.rate, unit.configuration.workload.seed or 0)
    return await open_loop(pipeline, requests, times, keep_audio, tick)


def _labels(
    pipeline: Pipeline, experiment: Experiment, row: RequestRow, request: Request, prompt: Prompt, audio: str | None
) -> dict[str, Any]:
    labels = {"prompt": prompt.name, "target_text": prompt.text, "speaker": request.speaker, "audio_file": audio}
    if experiment.results.save_tokens and row.error is None:
        ready = pipeline.front_end.prepare(request, pipeline.prompt_limit)
        labels["prompt_token_ids"] = ready.tensors["input_ids"].tolist()
        labels["text_token_ids"] = row.token_ids
        labels["codes"] = [frame for chunk in row.codes for frame in chunk.tolist()]
    return labels
