"""One request in full: what was asked and said, its way through the stages, its playback, its speech."""

from __future__ import annotations

import html

import ipywidgets
import pandas as pd

from omni_lab.frames import Run
from omni_lab.quality.recordings import kept
from omni_lab.views import request as views
from omni_lab.views.figures import LABELS, load_label
from omni_lab.views.steps import number, of_repeat
from omni_lab.workbench.player import AudioPlayer
from omni_lab.workbench.plot import Plot
from omni_lab.workbench.take import take_of

FIGURES = ("ttft_ms", "audio_ttfp_ms", "e2el_ms", "audio_rtf", "audio_underrun_s", "audio_duration_s")

SILENT = (
    "No audio of this request was kept. <code>results.save_audio</code> says of how many requests of a cell it is: "
    "<code>--set results.save_audio=64</code>, or <code>results: {{save_audio: 64}}</code> in the experiment; this run "
    "kept {kept}."
)


class RequestView(ipywidgets.VBox):
    """Shows one row of `run.requests` at a time, nothing at first."""

    def __init__(self, run: Run, dark: bool = False) -> None:
        super().__init__()
        self.run, self.dark = run, dark
        self.words = ipywidgets.HTML()
        self.plots: tuple[Plot, ...] = ()
        self.player: AudioPlayer | None = None

    def show(self, request: pd.Series | None) -> None:
        """Shows a request in place of the one before; None: nothing."""
        if self.player is not None:
            self.player.close()
            self.player = None
        if request is None:
            self.children = ()
            return
        self.plots = self.plots or (Plot(self.dark), Plot(self.dark))
        timeline, buffer = self.plots
        timeline.show_figure(views.timeline(request, of_repeat(self.run.steps, request), self.run.chunks))
        buffer.show_figure(views.playback_buffer(request))
        if isinstance(request.get("audio_file"), str):
            self.player = AudioPlayer([take_of(self.run, request)])
        self.words.value = self._words(request)
        self.children = [self.words, *([self.player] if self.player else []), timeline, buffer]

    def _words(self, request: pd.Series) -> str:
        """What was asked, what was said, and its figures."""
        told = [
            f"{LABELS[name][0]} {number(request[name])} {LABELS[name][1]}".strip()
            for name in FIGURES
            if name in request and pd.notna(request[name])
        ]
        place = (
            f"{request['configuration']}, {load_label(request['concurrency'])} in flight, repeat {request['repeat']}"
        )
        lines = [f"<b>{html.escape(str(request['id']))}</b> ({html.escape(place)}): {html.escape(' · '.join(told))}"]
        if isinstance(request.get("error"), str):
            lines.append(f"It failed: {html.escape(request['error'])}")
        if isinstance(request.get("target_text"), str):
            lines.append(f"Asked to say: {html.escape(request['target_text'])}")
        lines.append(f"Said: {html.escape(str(request.get('text') or ''))}")
        if self.player is None:
            lines.append(SILENT.format(kept=self._kept()))
        return f"<div style='line-height:1.5'>{'<br>'.join(lines)}</div>"

    def _kept(self) -> str:
        """How much audio the run kept, in words."""
        count = len(kept(self.run))
        return f"that of {count} of its {len(self.run.requests)} requests" if count else "none"
