"""Listeners beside each other: the playback buffers of several requests on one time axis."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.views import theme
from omni_lab.views.figures import by_cell, load_label
from omni_lab.views.request import playback_buffer
from omni_lab.views.steps import number

ROW = 130
"""Height of one listener's row, in pixels."""


def typical(requests: pd.DataFrame) -> pd.DataFrame:
    """One request of each cell: the one in the middle by underrun, then by first audio. Requests without audio are out.

    Of an even number, the one before the middle.
    """
    if not {"audio_underrun_s", "audio_ttfp_ms"} <= set(requests):
        return requests.iloc[:0]
    heard = requests.dropna(subset=["audio_underrun_s", "audio_ttfp_ms"])
    ordered = [cell.sort_values(["audio_underrun_s", "audio_ttfp_ms"], kind="stable") for _, cell in by_cell(heard)]
    return pd.concat([cell.iloc[[(len(cell) - 1) // 2]] for cell in ordered]) if ordered else heard


def buffers(requests: pd.DataFrame) -> go.Figure:
    """Seconds of audio that wait in each listener's player, a row for each request, times in ms since it was sent.

    Each row is what `request.playback_buffer` draws, with first audio and silence in words; all have the same scales.
    """
    title = {"text": "What waits in the listener's player, s of audio"}
    heard = [row for _, row in requests.iterrows() if isinstance(row.get("audio_times_ms"), list)]
    if not heard:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    spacing = min(0.12, 0.3 / len(heard))
    words = [_words(row) for row in heard]
    figure = make_subplots(
        len(heard), 1, shared_xaxes=True, shared_yaxes="all", vertical_spacing=spacing, subplot_titles=words
    )
    named: set[str] = set()
    for place, row in enumerate(heard, 1):
        single = playback_buffer(row)
        for trace in single.data:
            trace.update(legendgroup=trace.name, showlegend=trace.name not in named)
            named.add(trace.name)
            figure.add_trace(trace, place, 1)
        for span in single.layout.shapes:
            look = {"fillcolor": span.fillcolor, "opacity": span.opacity, "line_width": 0}
            figure.add_vrect(span.x0, span.x1, row=place, col=1, **look)
    height = ROW * len(heard)
    figure.update_layout(template=theme.LIGHT, title=title, height=height + 170, margin_t=84, legend_y=-64 / height)
    figure.update_annotations(x=0, xanchor="left", font_size=12)
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title="ms since the request was sent", row=len(heard))
    figure.update_yaxes(rangemode="tozero", nticks=4)
    return figure


def _words(request: pd.Series) -> str:
    """Whose buffer it is, when it spoke and how long it fell silent."""
    silent = request["audio_underrun_s"]
    silence = f"silent for {number(1000 * silent)} ms" if silent > 0 else "never silent"
    cell = f"<b>{request['configuration']}</b>, {load_label(request['concurrency'])} in flight"
    return f"{cell}: first audio after {number(request['audio_ttfp_ms'])} ms, then {silence}"
