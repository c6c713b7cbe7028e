"""A stretch of any Chrome trace: the ranges of every thread and device, one in the other."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.around_gap import NAMED, length

RANGES = 1200
"""Ranges of a picture at most; the longest are kept."""

DEPTH = 8
"""Ranges within ranges that are drawn at most."""

LOOKS = {
    "step": (theme.BLUE, ""),
    "device": (theme.GREEN, ""),
    "wait": (theme.SKY, "."),
    "call": (theme.ORANGE, ""),
    "python": (theme.GREY, ""),
    "range": (theme.PURPLE, ""),
}
"""Colour and pattern of each kind of range: marks of steps, what a device did, calls that wait, the other calls of the
runtime, Python's functions, all others."""


def trace_window(ranges: pd.DataFrame, gap: pd.Series, context_ms: float) -> go.Figure:
    """The ranges of a trace from `context_ms` before a gap to `context_ms` after it, in ms since the gap began.

    `ranges`: `lane` (the thread or device, in the order of the rows), `depth` (0: in no other), `name`, `kind` of
    LOOKS, `start_ns`, `end_ns`. `gap`: `start_ns` and `end_ns`. Ranges deeper than DEPTH, and all but the RANGES
    longest, are left out, and the title says so.
    """
    figure = go.Figure(layout={"template": theme.LIGHT, "barmode": "overlay", "bargap": 0.1})
    low, high = gap["start_ns"] - 1e6 * context_ms, gap["end_ns"] + 1e6 * context_ms
    inside = ranges[(ranges["end_ns"] >= low) & (ranges["start_ns"] <= high)]
    if inside.empty:
        return theme.empty(figure)
    begin, end = inside["start_ns"].clip(lower=low), inside["end_ns"].clip(upper=high)
    inside = inside.assign(x=(begin - gap["start_ns"]) / 1e6, wide=(end - begin) / 1e6)
    shown = inside[inside["depth"] < DEPTH].nlargest(RANGES, "wide", keep="first")
    deepest = shown.groupby("lane", sort=False)["depth"].max().reindex(list(dict.fromkeys(ranges["lane"]))).dropna() + 1
    first = deepest.cumsum() - deepest + 0.4 * np.arange(len(deepest))
    rows = first.reindex(shown["lane"]).to_numpy() + shown["depth"].to_numpy()
    _draw(figure, shown.assign(row=rows), (high - low) / 1e6)
    middle = first + (deepest - 1) / 2
    whole_ms = (gap["end_ns"] - gap["start_ns"]) / 1e6
    figure.add_vrect(x0=0, x1=whole_ms, fillcolor=theme.VERMILION, opacity=0.15, line_width=0, layer="below")
    words = f"{gap['worker']}: around a gap of {length(1e3 * whole_ms)}"
    if len(shown) < len(inside):
        words += f"; the longest {len(shown):,} of {len(inside):,} ranges"
    total = float(first.iloc[-1] + deepest.iloc[-1])
    height = 26 * total
    figure.update_layout(title_text=words, height=height + 150, legend_y=-60 / height)
    figure.update_xaxes(title="ms since the gap began", range=[-context_ms, whole_ms + context_ms])
    figure.update_yaxes(tickvals=middle.tolist(), ticktext=middle.index.tolist(), showgrid=False, range=[total, -0.8])
    return figure


def _draw(figure: go.Figure, ranges: pd.DataFrame, width_ms: float) -> None:
    for kind, (color, pattern) in LOOKS.items():
        own = ranges[ranges["kind"] == kind]
        if own.empty:
            continue
        room = (own["wide"] / width_ms * NAMED).astype(int)
        names = [name[:most] if most > 4 else "" for name, most in zip(own["name"], room, strict=True)]
        figure.add_bar(
            name=kind,
            base=own["x"].to_numpy("float32"),
            x=own["wide"].to_numpy("float32"),
            y=own["row"].to_numpy("float32"),
            orientation="h",
            width=0.92,
            marker={
                "color": color,
                "pattern": {"shape": pattern, "size": 5},
                "line": {"color": "white", "width": np.where(room > 0, 0.5, 0.0)},  # a hairline would be all border
            },
            text=names if any(names) else None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            customdata=np.column_stack([own["name"].str.slice(0, 80), own["end_ns"] - own["start_ns"]]),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]:,} ns, from %{base:.4f} ms<extra></extra>",
        )
