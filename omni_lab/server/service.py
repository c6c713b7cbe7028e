"""The pipeline behind the endpoints: readiness, turns, deadlines, and the events of one answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from omni_lab.assemble import open_pipeline
from omni_lab.core import Event, Finished, Prompt, Request, Sampling, StageError
from omni_lab.experiment import Experiment
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.server.bodies import ProfileBody, StageSampling
from omni_lab.server.errors import ApiError, as_api_error
from omni_lab.server.limits import Admission
from omni_lab.server.media import MediaReader
from omni_lab.server.metrics import Heard, Metrics
from omni_lab.tracing.profiler import CaptureError

LONG_TEXT = 4096
"""Characters from which a text is tokenized beside the event loop, as are media."""

log = logging.getLogger("uvicorn.error")


class Service:
    """One experiment, served. The pipeline starts after the server does: until then requests get 503."""

    def __init__(self, experiment: Experiment) -> None:
        limits = experiment.server
        self.experiment = experiment
        self.limits = limits
        self.model = limits.model_name or Path(experiment.model.checkpoint).name
        self.created = int(time.time())
        self.prompt_limit = limits.max_prompt_tokens or experiment.stages["thinker"].max_model_len
        self.pipeline: Pipeline | None = None
        self.admission = Admission(limits.max_concurrent, limits.max_queue, limits.queue_timeout_s)
        self.media = MediaReader(limits, self.prompt_limit)
        self.metrics = Metrics(
            lambda: self.admission.waiting, lambda: self.admission.running, lambda: self.unready is None
        )

    @property
    def unready(self) -> str | None:
        """Why no request can be served now."""
        return self.pipeline.unready if self.pipeline else "the stages are still starting"

    @asynccontextmanager
    async def running(self, say: Callable[[str], None] = lambda line: None) -> AsyncIterator[None]:
        """The pipeline runs, and its records are collected, until the block ends; `say` hears how its start goes on."""

        def compiling(count: int) -> AbstractContextManager[Callable[[], object]]:
            say(f"compiling {count} captured steps, once; this takes minutes")
            return nullcontext(lambda: None)

        def ready(worker: str, facts: dict[str, Any]) -> None:
            say(f"{worker} is ready")

        async with open_pipeline(self.experiment, ready, compiling) as pipeline:
            pipeline.prompt_limit = min(pipeline.prompt_limit, self.prompt_limit)
            self.pipeline = pipeline
            collecting = asyncio.create_task(self.metrics.collect_regularly(pipeline))
            try:
                yield
            finally:
                collecting.cancel()

    async def drain(self) -> None:
        """Requests at work have `drain_s` to finish, then they end with an error; new ones get 503."""
        if self.pipeline:
            await self.pipeline.close(self.limits.drain_s)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            raise ApiError(404, f"model: there is no {name!r} here; expected {self.model!r}", "model")

    def sampling(self, given: dict[str, StageSampling]) -> dict[str, Sampling]:
        """The experiment's sampling of every stage, and over it what a request says of its stages."""
        return {
            stage: _sampling(config.sampling.model_dump(), given.get(stage))
            for stage, config in self.experiment.stages.items()
        }

    async def events(self, request: Request, endpoint: str, heard: Heard) -> AsyncGenerator[Event]:
        """Events of an answer, `Finished` last, within the limits; counted in the metrics however it ends.

        `heard` is kept up to date. Raises ApiError. Closing the generator ends the request in every stage.
        """
        outcome = "aborted"
        try:
            if self.pipeline is None:
                raise self._not_ready()
            async with self.admission.turn():
                prompt = await self._prepare(request)
                heard.prompt_tokens = prompt.tokens
                interval_s = self.limits.text_interval_ms / 1e3
                answer = self.pipeline.generate(request, prompt, self.limits.deadline_s, interval_s)
                async with aclosing(answer) as events:
                    async for event in events:
                        heard.hear(event)
                        if isinstance(event, Finished):
                            outcome = "ok"
                        yield event
        except Exception as error:
            told = as_api_error(error)
            outcome = "refused" if told.status_code < 500 else "failed"
            if told.status_code == 500:
                log.error("%s: %s", request.id, told.detail, exc_info=None if isinstance(error, StageError) else error)
            raise told from error
        finally:
            self.metrics.done(endpoint, outcome, heard)

    async def start_profile(self, body: ProfileBody) -> dict[str, Any]:
        """Traces go into a new directory below `server.profile_dir`. Raises ApiError 409 while another capture runs."""
        directory = Path(self.limits.profile_dir, f"{self.experiment.name}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
        with self._capturing():
            await self.pipeline.captures.start(directory, body.stages, skip_steps=body.skip_steps, steps=body.steps)
        return {"status": "started", "directory": str(directory.absolute())}

    async def stop_profile(self) -> list[dict[str, Any]]:
        with self._capturing():
            return msgspec.to_builtins(await self.pipeline.captures.stop())

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        if self.unready:
            raise self._not_ready()
        try:
            yield
        except CaptureError as error:
            raise ApiError(409, str(error)) from None

    def _not_ready(self) -> ApiError:
        return ApiError(503, f"not ready: {self.unready}", headers={"Retry-After": "1"})

    async def _prepare(self, request: Request) -> Prompt:
        """The prompt, made in another thread if that may take long; answers are cut to what still fits behind it."""
        if any(_takes_long(message.get("content")) for message in request.messages):
            prompt = await asyncio.to_thread(self._read_and_prepare, request)
        else:
            prompt = self._read_and_prepare(request)
        for stage, length in prompt.lengths.items():
            room, sampling = self.pipeline.max_lengths[stage] - length, request.sampling[stage]
            if 1 <= room < sampling.max_tokens:
                least = min(sampling.min_tokens, room)
                request.sampling[stage] = dataclasses.replace(sampling, max_tokens=room, min_tokens=least)
        return prompt

    def _read_and_prepare(self, request: Request) -> Prompt:
        request.messages = self.media.read(request.messages)
        return self.pipeline.prepare(request)


def _takes_long(content: Any) -> bool:
    if isinstance(content, list):
        return any(not isinstance(part, dict) or part.get("type") != "text" for part in content) or (
            sum(len(str(part.get("text"))) for part in content) > LONG_TEXT
        )
    return isinstance(content, str) and len(content) > LONG_TEXT


def _sampling(base: dict[str, Any], given: StageSampling | None) -> Sampling:
    if given:
        names = StageSampling.model_fields.keys() & given.model_fields_set - {"ignore_eos"}
        base |= {name: value for name in names if (value := getattr(given, name)) is not None}
        base["top_k"] = max(0, base["top_k"])
        if given.max_tokens and given.min_tokens is None:
            base["min_tokens"] = min(base["min_tokens"], given.max_tokens)
        if given.ignore_eos:
            base["min_tokens"] = base["max_tokens"]
        if base["min_tokens"] > base["max_tokens"]:
            raise ApiError(400, f"min_tokens: expected at most max_tokens ({base['max_tokens']})", "min_tokens")
    return Sampling(**base)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
