"""What a run measures: a pipeline in this process, or (`http_client.py`) a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Protocol

from omni_lab.core import AudioChunk, Event, Finished, Request, RequestError, StageError, TextDelta
from omni_lab.metrics.records import RequestRow
from omni_lab.pipeline.collector import Measured
from omni_lab.pipeline.orchestrator import Pipeline


class Target(Protocol):
    """Answers requests, and tells what was measured inside of it.

    `effective`: what of the experiment is in effect, for run.json; `replicas`: workers of each stage.
    """

    effective: dict[str, Any]
    replicas: Mapping[str, int]

    async def send(self, request: Request, row: RequestRow, keep_audio: bool) -> None:
        """Sends a request and waits for its end. What is wrong with it alone is noted in its row.

        Rows are complete once `take_records` has been called after it. Raises PipelineError when the target is broken.
        """

    async def take_records(self) -> Measured:
        """What was measured since the last call."""

    def tokens(self, request: Request, row: RequestRow) -> dict[str, Any]:
        """Tokens and codes of an answer as far as the target tells them, for requests.jsonl."""


class PipelineTarget:
    """A pipeline in this process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.effective = pipeline.effective
        self.replicas = pipeline.replicas
        self.take_records = pipeline.take_records

    async def send(self, request: Request, row: RequestRow, keep_audio: bool) -> None:
        row.sent_ns = time.monotonic_ns()
        try:
            async with aclosing(self.pipeline.generate(request)) as events:
                async for event in events:
                    note(row, event, keep_audio)
            if not row.reasons:
                row.error = "the answer ended without a finish reason"
            elif "abort" in row.reasons.values():
                row.error = "aborted"
        except (RequestError, StageError) as error:
            row.error = " ".join(str(error).split())
        row.end_ns = row.end_ns or time.monotonic_ns()

    def tokens(self, request: Request, row: RequestRow) -> dict[str, Any]:
        ready = self.pipeline.front_end.prepare(request, self.pipeline.prompt_limit)
        return {
            "prompt_token_ids": ready.tensors["input_ids"].tolist(),
            "text_token_ids": row.token_ids,
            "codes": [frame for chunk in row.codes for frame in chunk.tolist()],
        }


def note(row: RequestRow, event: Event, keep_audio: bool) -> None:
    """Notes in a request's row that an event of its answer has arrived now."""
    now = time.monotonic_ns()
    match event:
        case TextDelta():
            row.text_ns.append(now)
            row.text_tokens.append(len(event.token_ids))
            row.token_ids += event.token_ids
            row.text += event.text
        case AudioChunk():
            row.audio_ns.append(now)
            row.audio_samples.append(len(event.samples))
            row.audio_frames.append(event.frames)
            if keep_audio:
                row.audio.append(event.samples)
            if event.codes is not None:
                row.codes.append(event.codes)
        case Finished():
            row.end_ns = now
            row.reasons = event.reasons
            row.prompt_tokens = event.prompt_tokens
            row.text = event.text
