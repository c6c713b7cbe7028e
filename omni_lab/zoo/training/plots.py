"""Pictures of a training, as pages that open without a network: losses and error rates over time, and spectrograms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.views import theme
from omni_lab.zoo.training.pitch import RATE

WINDOW, HOP = 1024, 240
"""Samples of one spectrum, and between two."""
HIGHEST, QUIETEST = 6000, -70
"""Frequency in Hz up to which spectra are drawn, and the level in dB below the loudest point that is black."""


def curves(folder: Path) -> Path:
    """Write FOLDER/curves.html: a chart for each network with one line for each loss, and one of the error rates."""
    losses, scores = lines(folder / "losses.jsonl"), lines(folder / "scores.jsonl")
    stages = list(dict.fromkeys(line["stage"] for line in losses))
    titles = [*stages, *(["word error rate, %"] if scores else [])]
    figure = make_subplots(rows=max(1, len(titles)), cols=1, subplot_titles=titles)
    for row, stage in enumerate(stages, start=1):
        own = {line["step"]: line for line in losses if line["stage"] == stage}  # a step done again counts once
        steps = sorted(own)
        for name in sorted(own[steps[-1]].keys() - {"stage", "step", "seconds"}):
            points = [(own[step]["seconds"] / 60, own[step][name]) for step in steps]
            figure.add_trace(_line(points, f"{stage}: {name}"), row=row, col=1)
        figure.update_xaxes(title_text="minutes of computing", row=row, col=1)
    if scores:
        for name in scores[-1].keys() - {"hours"}:
            points = [(line["hours"], line[name]["word_error_rate"]) for line in scores]
            figure.add_trace(_line(points, name), row=len(titles), col=1)
        figure.update_xaxes(title_text="hours of computing, all networks", row=len(titles), col=1)
    figure.update_layout(template=theme.template(), height=400 * max(1, len(titles)))
    page = folder / "curves.html"
    figure.write_html(page, include_plotlyjs=True)
    return page


def spectrograms(sounds: list[tuple[str, np.ndarray]]) -> go.Figure:
    """One spectrogram for each (title, waveform at RATE), one below the other: time in s, frequency in Hz."""
    titles = [title for title, _ in sounds]
    figure = make_subplots(len(sounds), 1, subplot_titles=titles, vertical_spacing=0.3 / (len(sounds) + 1))
    bins = HIGHEST * WINDOW // RATE
    for row, (_, wave) in enumerate(sounds, start=1):
        parts = np.lib.stride_tricks.sliding_window_view(np.pad(wave, WINDOW // 2), WINDOW)[::HOP] * np.hanning(WINDOW)
        level = 20 * np.log10(np.abs(np.fft.rfft(parts))[:, :bins].T + 1e-6)
        picture = go.Heatmap(
            z=np.round(level - level.max(), 1),
            dx=HOP / RATE,
            dy=RATE / WINDOW,
            zmin=QUIETEST,
            zmax=0,
            colorscale="Magma",
            showscale=False,
        )
        figure.add_trace(picture, row=row, col=1)
        figure.update_yaxes(title_text="Hz", row=row, col=1)
    figure.update_xaxes(title_text="s", row=len(sounds), col=1)
    return figure.update_layout(template=theme.template(), height=230 * len(sounds))


def _line(points: list[tuple[float, float]], name: str) -> go.Scatter:
    return go.Scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name)


def lines(file: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line; empty before there is one."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
