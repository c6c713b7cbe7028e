"""The live player: a widget that speaks while the pipeline generates."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
from traitlets import Dict, Int, List, Unicode

from omni_lab.assemble import open_pipeline
from omni_lab.core import AudioChunk, PipelineError, RequestError, StageError, TextDelta
from omni_lab.experiment import Experiment, ExperimentError, load_experiment
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.records import RequestRow
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.results import request_line
from omni_lab.views import theme
from omni_lab.workbench.loop import background
from omni_lab.workbench.module import css, esm
from omni_lab.workbench.runs import found
from omni_lab.workbench.take import Take, facts
from omni_lab.workload.dataset import Prompt, reading
from omni_lab.workload.requests import make_request
from omni_lab.workload.target import note

LIGHT = ("executor=inline", "optimizations.graphs={thinker: false, talker: false, code2wav: false}")
"""Laid over a file before the caller's settings: it starts in seconds, and compiles nothing unless asked to."""

SHOW_S = 0.05
"""Text that comes sooner after what was shown last is shown with what comes next."""

STYLES = ("card", "arrivals", "live")

EXPECTED = (ExperimentError, PipelineError, RequestError, StageError)
"""Mistakes whose message is a sentence for users."""


class LivePlayer(anywidget.AnyWidget):
    """Speaks a text while the pipeline generates it, in the notebook: text, sound and picture as they arrive.

    `experiment_or_path`: an experiment file, relative to here or to the checkout, over which `LIGHT` and then
    `settings` (`KEY=VALUE`, like `--set`) are laid, or an experiment as it is. It opens on the background loop; until
    then what is said waits. What is wrong with the experiment, the checkpoint or a text is told in the widget, in one
    sentence, and raised by `take`.
    """

    _esm = esm("live")
    _css = css(*STYLES) + f".omni-live {{ {theme.css()} }}"
    sample_rate = Int(SAMPLE_RATE).tag(sync=True)
    state = Unicode("loading").tag(sync=True)
    """One of loading, ready, speaking, failed, closed."""
    status = Unicode("loading …").tag(sync=True)
    error = Unicode().tag(sync=True)
    prompt = Unicode("Good morning.").tag(sync=True)
    answer = Unicode().tag(sync=True)
    speakers = List(Unicode()).tag(sync=True)
    record = Dict(default_value=None, allow_none=True).tag(sync=True)
    """What has arrived of the answer: arrivals.js says what is in it."""

    def __init__(self, experiment_or_path: Experiment | Path | str, settings: Iterable[str] = ()) -> None:
        super().__init__()
        self.pipeline: Pipeline | None = None
        self._experiment: Experiment | None = None
        self._failure: Exception | None = None
        self._take: Take | None = None
        self._numbers = itertools.count()
        self._opened = asyncio.Event()
        self._speaking: Future[None] | None = None
        self._open = background().submit(self._run(experiment_or_path, tuple(settings)))
        self.on_msg(self._asked)

    def say(self, text: str, speaker: str | None = None) -> None:
        """Speaks a text, and stops what is spoken; does not wait. `speaker`: a name of the checkpoint's, or None."""
        if self.state == "closed":
            raise RuntimeError("this player is closed; make another one: LivePlayer(...)")
        self.stop()
        self._take, number = None, next(self._numbers)
        self.send({"begin": number})
        with self.hold_sync():
            self.prompt, self.answer, self.record = text, "", None
        self._speaking = background().submit(self._say(text, speaker, number))

    def stop(self) -> None:
        """Silences the player. An answer that is not finished is aborted in the pipeline, and its slot is free."""
        if self._speaking:
            self._speaking.cancel()
        self.send({"silence": True})

    @property
    def take(self) -> Take:
        """The last answer; waits for its end. If it was stopped, what had arrived by then.

        Raises ValueError if nothing was spoken, and what was wrong with the experiment or the text if something was.
        """
        if self._speaking is None:
            raise ValueError('nothing has been said yet; expected live.say("Good morning.") before')
        with suppress(CancelledError):
            self._speaking.result()
        if self._take is None:
            raise ValueError("nothing was spoken: the answer had no audio, or was stopped before the first")
        return self._take

    def close(self) -> None:
        """Stops, closes the pipeline and takes the widget off the page. May be called again."""
        if self.state != "closed":
            self.stop()
            self._open.cancel()
            self.state = "closed"
        super().close()

    def _asked(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        """A message of a view: {"say": text, "speaker": name or None} or {"stop": true}."""
        if "say" in content:
            self.say(content["say"], content.get("speaker"))
        elif "stop" in content:
            self.stop()

    async def _run(self, given: Experiment | Path | str, settings: tuple[str, ...]) -> None:
        """The pipeline's life: until the player is closed."""
        try:
            self._experiment = await asyncio.to_thread(read_experiment, given, settings)
            self.status = f"loading {Path(self._experiment.model.checkpoint).name} …"
            async with open_pipeline(self._experiment, compiling=self._compiling) as self.pipeline:
                self._now("ready", "ready", speakers=voices(self.pipeline.front_end.speakers))
                self._opened.set()
                await asyncio.Event().wait()
        except Exception as error:
            self._failure = error
            self._now("failed", "it cannot start", error=sentence(error))
            self._opened.set()

    def _compiling(self, graphs: int) -> AbstractContextManager[Callable[[], None]]:
        self.status = f"compiling {graphs} captured steps, once; this takes minutes"
        return nullcontext(lambda: None)

    async def _say(self, text: str, speaker: str | None, number: int) -> None:
        row = None
        await self._opened.wait()
        if self._failure:
            raise self._failure
        self.error = ""
        try:
            if not text.strip():
                raise RequestError("expected something to say, got an empty one", "text")
            messages = reading(self._experiment.workload, text)
            request = make_request(self._experiment, Prompt(text, messages, text, speaker), 0, "live")
            self._now("speaking", "speaking")
            row = RequestRow(request.id, number, due_ns=time.monotonic_ns(), sent_ns=time.monotonic_ns())
            shown = 0.0
            async with aclosing(self.pipeline.generate(request)) as events:
                async for event in events:
                    note(row, event, keep_audio=True)
                    if isinstance(event, AudioChunk):
                        self.send({"chunk": number}, [np.ascontiguousarray(event.samples, "<f4")])
                    if not isinstance(event, TextDelta) or time.monotonic() > shown + SHOW_S:
                        self._show(row)
                        shown = time.monotonic()
            self._now("ready", "ready")
        except Exception as error:
            self._now("ready", "ready", error=sentence(error))
            raise
        except asyncio.CancelledError:
            self._now("ready", "stopped")
            raise
        finally:
            if row and row.audio:
                self._take = take_of_row(row, self._experiment.name)

    def _now(self, state: str, status: str, **traits: Any) -> None:
        with self.hold_sync():
            for name, value in {"state": state, "status": status, **traits}.items():
                setattr(self, name, value)

    def _show(self, row: RequestRow) -> None:
        """What has arrived so far."""
        line = request_line(row, SAMPLE_RATE, None)
        text_times = zip(line["text_times_ms"], row.text_tokens, strict=True)
        with self.hold_sync():
            self.answer = row.text
            self.record = {
                "text_times_ms": [at for at, tokens in text_times if tokens],
                "audio_times_ms": line["audio_times_ms"],
                "audio_chunk_samples": line["audio_chunk_samples"],
                "sample_rate": SAMPLE_RATE,
                "e2el_ms": line["e2el_ms"] if row.end_ns else None,
            }


def read_experiment(given: Experiment | Path | str, settings: Iterable[str]) -> Experiment:
    """A file with `LIGHT` and the settings laid over it, or an experiment as it is. Raises ExperimentError."""
    if not isinstance(given, Experiment):
        return load_experiment(found(given), [*LIGHT, *settings])
    if settings:
        raise ExperimentError("settings: expected none beside an experiment; give the path of its file instead")
    return given


def voices(speakers: dict[str, int]) -> list[str]:
    """One name of each voice: a checkpoint may have several for the same."""
    names: dict[int, str] = {}
    for name, code in speakers.items():
        names.setdefault(code, name)
    return list(names.values())


def take_of_row(row: RequestRow, label: str) -> Take:
    """An answer with its audio, which may have been stopped before its end."""
    line = request_line(row, SAMPLE_RATE, None)
    return Take(
        label,
        np.concatenate(row.audio),
        SAMPLE_RATE,
        line["audio_times_ms"],
        row.audio_samples,
        row.text,
        facts(line),
        row.audio_frames,
    )


def sentence(error: Exception) -> str:
    """What is wrong, on one line; what nobody foresaw, with its kind."""
    told = "; ".join(line.strip() for line in str(error).splitlines())
    return told if isinstance(error, EXPECTED) else f"{type(error).__name__}: {told}"
