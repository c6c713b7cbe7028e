"""Figures of a trace's step gaps, whoever wrote the trace: how long they are, when they happen, what fills them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.figures import thin
from omni_lab.views.steps import number

POINTS = 2000
"""Gaps of one worker that are drawn at most; the longest are always among them."""

LONGEST = 20
TOP = 8
"""Causes that have a bar of their own."""

NAME = 48
"""Characters of a cause's name that are shown; hovering shows all."""


OVERVIEW = {
    "status": "status",
    "found": "what marks a step",
    "note": "note",
    "steps": "steps",
    "step_ms_median": "step, ms",
    "gap_us_median": "gap, µs",
    "gap_us_p95": "gap p95, µs",
    "gap_share": "gap share",
    "idle_share": "idle share",
}
"""Columns of an analysis's workers that `overview` shows, and their headings."""


def overview(workers: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A row for each worker of each trace; where a trace cannot tell, its reason stands in place of what was found."""
    rows = []
    for trace, frame in workers.items():
        said = frame["reason"].where(frame["reason"].astype(bool), frame["found"]).str.removeprefix("markers: ")
        parts = said.str.partition("; ")
        rows.append(frame.assign(trace=trace, found=parts[0], note=parts[2])[["trace", "worker", *OVERVIEW]])
    return pd.concat(rows).rename(columns=OVERVIEW).set_index(["trace", "worker"]).round(3)


def gaps(frame: pd.DataFrame) -> go.Figure:
    """Each gap of each worker over the recording, on a logarithmic axis; the line is the worker's median.

    `frame` is `Analysis.gaps` of omni_lab.tracing. Where a worker has more than POINTS gaps, they are thinned evenly,
    and its LONGEST are kept.
    """
    title = {"text": "Gaps before each step, µs"}
    figure = go.Figure(layout={"template": theme.LIGHT, "title": title, "height": 400})
    found = frame[frame["gap_us"] > 0]
    if found.empty:
        return theme.empty(figure)
    looks = theme.style(found["worker"])
    for worker, own in found.groupby("worker", sort=False):
        look, since = looks[worker], own["start_ns"].min()
        chosen = (
            pd.concat([thin(own, POINTS), own.nlargest(LONGEST, "gap_us")]).drop_duplicates().sort_values("start_ns")
        )
        median = own["gap_us"].median()
        figure.add_scatter(
            name=f"{worker}: median {number(median)} µs of {len(own):,}",
            x=(chosen["start_ns"] - since) / 1e6,
            y=chosen["gap_us"],
            mode="markers",
            marker={"color": look["color"], "symbol": look["symbol"], "size": 7, "opacity": 0.8},
            customdata=chosen[["step", "kind", "batch"]],
            hovertemplate="before step %{customdata[0]} (%{customdata[1]}, batch %{customdata[2]}): %{y:,.0f} µs",
        )
        figure.add_hline(y=median, line={"color": look["color"], "dash": look["dash"], "width": 1})
    figure.update_xaxes(title="ms since the worker's first gap", rangemode="tozero")
    return figure.update_yaxes(type="log", dtick="D2")


def causes(frame: pd.DataFrame) -> go.Figure:
    """What the host did in the gaps of one worker: the TOP causes and the rest, as shares of its gap time.

    `frame`: the rows of one worker in `Analysis.causes`. Hatched: calls that wait.
    """
    worker = str(frame["worker"].iloc[0]) if len(frame) else "the trace"
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": f"{worker}: what fills its gaps"}})
    if frame.empty:
        return theme.empty(figure)
    shown = frame.sort_values("share", ascending=False)
    rest = shown.iloc[TOP:]
    shown = shown.iloc[:TOP].assign(waits=lambda rows: rows["kind"] == "wait")
    if len(rest):
        words = {"cause": f"{len(rest)} others", "ms": rest["ms"].sum(), "share": rest["share"].sum(), "waits": False}
        shown = pd.concat([shown, pd.DataFrame([words | {"ranges": rest["ranges"].sum()}])], ignore_index=True)
    places = np.arange(len(shown))
    figure.add_bar(
        x=shown["share"],
        y=places,
        orientation="h",
        width=0.6,
        marker={
            "color": [theme.SKY if waits else theme.VERMILION for waits in shown["waits"]],
            "pattern": {"shape": ["/" if waits else "" for waits in shown["waits"]], "size": 5},
        },
        text=[f"{share:.0%}, {number(ms)} ms" for share, ms in zip(shown["share"], shown["ms"], strict=True)],
        textposition="outside",
        cliponaxis=False,
        customdata=shown[["cause", "ranges"]],
        hovertemplate="%{customdata[0]}: %{x:.1%} of the gap time, in %{customdata[1]:,} ranges<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(height=130 + 30 * len(shown))
    figure.update_xaxes(tickformat=".0%", range=[0, 1.25 * shown["share"].max()], title="share of the gap time")
    return figure.update_yaxes(
        tickvals=places, ticktext=[_short(name) for name in shown["cause"]], autorange="reversed"
    )


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"
