"""Prometheus metrics: requests as the server saw them, and the workers' own records."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from omni_lab.core import AudioChunk, Event, PipelineError, TextDelta
from omni_lab.metrics.continuity import underrun_s
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.phases import HOST
from omni_lab.pipeline.orchestrator import Measured, Pipeline

COLLECT_S = 5.0
"""The workers' records are fetched so often, so that they do not overflow; and at each scrape."""

SCRAPE_S = 2.0
"""A scrape waits at most this long for the workers' records, then shows the last ones."""

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


_host_ns = attrgetter(*(f"{phase}_ns" for phase in HOST))


@dataclass(slots=True)
class Heard:
    """One request, as its client will see it: times in seconds since its body had arrived."""

    started: float = field(default_factory=time.monotonic)
    first_text: float | None = None
    audio_at: list[float] = field(default_factory=list)
    audio_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    text_tokens: int = 0
    codec_frames: int = 0

    def hear(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.text_tokens += len(event.token_ids)
            self.first_text = self.first_text or time.monotonic() - self.started
        elif isinstance(event, AudioChunk) and len(event.samples):
            self.codec_frames += event.frames
            self.audio_at.append(time.monotonic() - self.started)
            self.audio_s.append(len(event.samples) / SAMPLE_RATE)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, queued: Callable[[], int], running: Callable[[], int], ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._gauge("omni_ready", "1 while every stage answers", ready)
        self._gauge("omni_requests_waiting", "Requests that wait for their turn", queued)
        self._gauge("omni_requests_running", "Requests at work", running)
        self.requests = self._counter("omni_requests", "Requests by outcome", "endpoint", "outcome")
        self.tokens = self._counter("omni_tokens", "Prompt and text tokens and codec frames of answers", "kind")
        self.audio_s = self._counter("omni_audio_seconds", "Seconds of audio of answers")
        self.underruns = self._counter("omni_audio_underruns", "Answers that a player at the first chunk ran out of")
        self.ttft = self._histogram("omni_ttft_seconds", "Time to first token", LATENCIES)
        self.ttfp = self._histogram("omni_audio_ttfp_seconds", "Time to the first chunk with samples", LATENCIES)
        self.e2el = self._histogram("omni_e2e_seconds", "Time to the end of an answer", LATENCIES)
        self.rtf = self._histogram("omni_audio_rtf", "Time of the last audio chunk / seconds of audio", RATIOS)
        self.underrun = self._histogram("omni_audio_underrun_seconds", "Largest shortage of a player", LATENCIES)
        stage = ("stage", "replica")
        self.of_stages = (
            self._counter("omni_stage_steps", "Engine steps", *stage),
            self._counter("omni_stage_step_seconds", "Time inside steps", *stage),
            self._counter("omni_stage_step_sequences", "Sequences in steps; / steps is the mean batch", *stage),
            self._counter("omni_stage_gap_seconds", "Time between steps that the stage spent itself", *stage),
            self._counter("omni_stage_tokens", "Text tokens or codec frames that steps made", *stage),
        )
        self.lost = self._counter("omni_stage_lost_steps", "Steps whose records were overwritten before a collection")
        self.of_edges = (
            self._counter("omni_handoff_payloads", "Payloads received", "edge"),
            self._counter("omni_handoff_bytes", "Bytes of payloads, headers included", "edge"),
            self._counter("omni_handoff_build_seconds", "From produced to sent", "edge"),
            self._counter("omni_handoff_transfer_seconds", "From sent to received", "edge"),
        )
        self.collecting: asyncio.Task | None = None

    def done(self, endpoint: str, outcome: str, heard: Heard) -> None:
        """A request ended; latencies count only if it was answered."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome != "ok":
            return
        self.tokens.labels("prompt").inc(heard.prompt_tokens)
        self.tokens.labels("text").inc(heard.text_tokens)
        self.tokens.labels("codec").inc(heard.codec_frames)
        self.e2el.observe(time.monotonic() - heard.started)
        if heard.first_text is not None:
            self.ttft.observe(heard.first_text)
        if heard.audio_at:
            seconds, short = sum(heard.audio_s), underrun_s(heard.audio_at, heard.audio_s)
            self.audio_s.inc(seconds)
            self.ttfp.observe(heard.audio_at[0])
            self.rtf.observe(heard.audio_at[-1] / seconds)
            self.underrun.observe(short)
            self.underruns.inc(short > 0)

    async def collect_regularly(self, pipeline: Pipeline) -> None:
        while True:
            await asyncio.sleep(COLLECT_S)
            await self._collect(pipeline)

    async def scrape(self, pipeline: Pipeline | None) -> bytes:
        """The exposition, with what the workers have recorded until now."""
        if pipeline:
            await self._collect(pipeline)
        return generate_latest(self.registry)

    async def _collect(self, pipeline: Pipeline) -> None:
        """One collection at a time: whoever comes meanwhile waits for the same one, up to SCRAPE_S."""
        if self.collecting is None or self.collecting.done():
            self.collecting = asyncio.create_task(self._take(pipeline))
        await asyncio.wait({self.collecting}, timeout=SCRAPE_S)

    async def _take(self, pipeline: Pipeline) -> None:
        with contextlib.suppress(PipelineError):  # /health says so
            self.add(await pipeline.take_records())

    def add(self, measured: Measured) -> None:
        """Sums by worker and by edge first: a counter costs much more than an addition."""
        stages: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0] * 5)
        for row in measured.steps:
            sums = stages[row.stage, str(row.replica)]
            sums[0] += 1
            sums[1] += (row.end_ns - row.start_ns) / 1e9
            sums[2] += row.batch
            sums[3] += sum(_host_ns(row)) / 1e9
            sums[4] += row.tokens
        for labels, sums in stages.items():
            for counter, value in zip(self.of_stages, sums, strict=True):
                counter.labels(*labels).inc(value)
        edges: dict[str, list[float]] = defaultdict(lambda: [0] * 4)
        for chunk in measured.chunks:
            sums = edges[chunk.edge]
            sums[0] += 1
            sums[1] += chunk.bytes
            sums[2] += max(0, chunk.sent_ns - chunk.produced_ns) / 1e9
            sums[3] += max(0, chunk.received_ns - chunk.sent_ns) / 1e9
        for edge, sums in edges.items():
            for counter, value in zip(self.of_edges, sums, strict=True):
                counter.labels(edge).inc(value)
        self.lost.inc(measured.lost_steps)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)
