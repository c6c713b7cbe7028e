"""Runs the cells of an experiment: opens the targets, sends the requests, hands the figures to the run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from omni_lab.connectors.wire import Capturing
from omni_lab.core import Request
from omni_lab.experiment import Experiment
from omni_lab.metrics.aggregate import add_counts, repeat_figures, stage_figures
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.records import RequestRow
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.results import RunDirectory, request_line
from omni_lab.tracing.capture import Traces, capture
from omni_lab.workload.arrivals import poisson_arrivals
from omni_lab.workload.client import Sent, closed_loop, open_loop
from omni_lab.workload.dataset import Dataset, Prompt
from omni_lab.workload.machine import Reading, others_share
from omni_lab.workload.open_target import Open, Progress, open_target
from omni_lab.workload.plan import Unit
from omni_lab.workload.requests import make_request
from omni_lab.workload.target import PipelineTarget, Target


async def run_units(
    units: Sequence[Unit],
    datasets: dict[str, Dataset],
    directory: RunDirectory,
    progress: Progress,
    open_target: Open = open_target,
) -> None:
    """Runs the units one after the other; the target starts anew where the configuration changes.

    `datasets`: one for each configuration's name. Each unit is in the directory when the next one starts.
    Raises PipelineError when a target cannot start or breaks.
    """
    opened: Experiment | None = None
    async with AsyncExitStack() as stack:
        for unit in units:
            if unit.configuration is not opened:
                await stack.aclose()
                opened = unit.configuration
                target = await stack.enter_async_context(open_target(opened, progress, directory.path))
                directory.opened(opened.name, target.effective)
            await _run_unit(target, unit, datasets[opened.name], directory, progress)


async def _run_unit(target: Target, unit: Unit, dataset: Dataset, directory: RunDirectory, progress: Progress) -> None:
    experiment, workload = unit.configuration, unit.configuration.workload
    count, warmup = unit.requests, unit.warmup
    prompts = dataset.take(count + warmup, workload.seed)
    if warmup:
        requests = _requests(experiment, prompts[count:], f"{unit.label}-warmup")
        with progress(f"{unit.label}: warm-up", warmup) as tick:
            await closed_loop(target.send, requests, unit.concurrency or warmup, done=tick)
    before = await target.take_records()  # what belongs to the warm-up
    requests = _requests(experiment, prompts[:count], unit.label)
    keep_audio = experiment.results.save_audio if unit.repeat == 0 else 0
    traces, rows = None, []
    async with AsyncExitStack() as stack:
        if experiment.profile.enabled and unit.repeat == 0 and isinstance(target, PipelineTarget):
            traces = await stack.enter_async_context(_captured(target.pipeline, unit, directory, rows, progress))
        machine = Reading()
        with progress(unit.label, count) as tick:
            sent = await _send(target, requests, unit, keep_audio, tick)
        others = others_share(machine, Reading())
        rows += sent.rows
    measured = traces.measured if traces else await target.take_records()
    fixed_frames = workload.output.codec_frames is not None
    figures = repeat_figures(sent.rows, unit.concurrency, SAMPLE_RATE, sent.cpu_s, fixed_frames)
    figures["stages"] = stage_figures(measured.steps, figures["duration"], target.replicas)
    add_counts(figures["stages"], before.counters, measured.counters)
    figures["lost_steps"] = measured.lost_steps
    figures["others_cpu_share"] = others
    for row, request, prompt in zip(sent.rows, requests, prompts, strict=False):
        row.labels = _labels(target, experiment, row, request, prompt, directory.save_audio(row, SAMPLE_RATE))
    lines = [request_line(row, SAMPLE_RATE, unit.concurrency) for row in sent.rows]
    captured = traces.record(directory.path) if traces else None
    directory.add(unit.key, figures, lines, measured.steps, measured.chunks, captured)


@asynccontextmanager
async def _captured(
    pipeline: Pipeline, unit: Unit, directory: RunDirectory, rows: list[RequestRow], progress: Progress
) -> AsyncIterator[Traces]:
    """The capture of a unit, with a bar of the MB that are recorded. `rows` are its requests once they have ended."""
    profile = unit.configuration.profile
    stages = [stage for stage in profile.stages if stage in pipeline.replicas]
    options = profile.model_dump(exclude={"enabled", "stages"})
    shown = 0
    with progress(f"{unit.label}: MB recorded", round(profile.max_mb)) as tick:

        def heard(_: Capturing) -> None:
            nonlocal shown
            for _ in range(shown, round(pipeline.captures.recorded_bytes / 1e6)):
                tick()
                shown += 1

        where = directory.traces(unit.label)
        async with capture(pipeline, where, stages or None, **options, heard=heard, requests=rows) as traces:
            yield traces


def _requests(experiment: Experiment, prompts: Sequence[Prompt], label: str) -> list[Request]:
    return [make_request(experiment, prompt, index, label) for index, prompt in enumerate(prompts)]


async def _send(
    target: Target, requests: list[Request], unit: Unit, keep_audio: int, tick: Callable[[], object]
) -> Sent:
    arrivals = unit.configuration.workload.arrivals
    if arrivals is None:
        return await closed_loop(target.send, requests, unit.concurrency or 1, keep_audio, tick)
    times = poisson_arrivals(len(requests), arrivals.rate, unit.configuration.workload.seed or 0)
    return await open_loop(target.send, requests, times, keep_audio, tick)


def _labels(
    target: Target, experiment: Experiment, row: RequestRow, request: Request, prompt: Prompt, audio: str | None
) -> dict[str, Any]:
    labels = {"prompt": prompt.name, "target_text": prompt.text, "speaker": request.speaker, "audio_file": audio}
    if experiment.results.save_tokens and row.error is None:
        labels |= target.tokens(request, row)
    return labels
