"""The gaps between steps: how long they are and what they are made of."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.metrics.phases import CAUSES, HOST
from omni_lab.views import theme
from omni_lab.views.figures import by_configuration, load_label

BINS = 60
"""Bins of a histogram at most, of equal width on its logarithmic axis; where there are few gaps, there are less."""

LONG_US = 20_000
"""Above this length a mean gap is written in ms."""

WORKER = ["configuration", "concurrency", "repeat", "stage", "replica"]
"""What identifies a step loop in `Run.steps`."""

CAUSE_NAMES = {
    "input": "wait for input",
    "slot": "wait for a slot",
    "schedule": "schedule",
    "payload": "build payloads",
    "send": "send",
    "other": "other",
}
"""What each cause of a gap is called in a picture."""

CAUSE_LOOKS = {
    "input": (theme.SKY, "."),
    "slot": (theme.GREEN, "/"),
    "schedule": (theme.PURPLE, ""),
    "payload": (theme.VERMILION, ""),
    "send": (theme.ORANGE, ""),
    "other": (theme.GREY, ""),
}
"""Colour and pattern of each cause; the two kinds of waiting are hatched."""


def gaps(steps: pd.DataFrame) -> pd.DataFrame:
    """The gap before each step that follows another one of its worker, in µs.

    The rows of `Run.steps` with `gap_us`, the gap of the loop (schedule + payload + send + other); `<cause>_us` for
    every cause; `worker`, a number for each of WORKER; and `between_us`, the time from the end of the step before to
    the start of this one less the idle time, which the causes must add up to; NaN where the step before is not in the
    record. The first step of a worker, steps inside another one, and runs without a step clock have no rows.
    """
    worker = steps.groupby(WORKER, sort=False, dropna=False, observed=True).ngroup()
    ordered = steps.assign(worker=worker).sort_values(["worker", "start_ns"], ignore_index=True)
    before = ordered.groupby("worker")[["end_ns", "step"]].shift()
    between = (ordered["start_ns"] - before["end_ns"] - ordered["idle_ns"]) / 1e3
    figures = {f"{cause}_us": ordered[f"{cause}_ns"] / 1e3 for cause in CAUSES}
    figures["gap_us"] = sum(figures[f"{cause}_us"] for cause in HOST)
    figures["between_us"] = between.where(ordered["step"] == before["step"] + 1)
    return ordered.assign(**figures)[before["end_ns"].notna() & (ordered["schedule_ns"] > 0)]


def of_stage(steps: pd.DataFrame, stage: str, concurrency: float | None) -> pd.DataFrame:
    """The rows of one stage at one concurrency (None: open loop), of any table that has both columns."""
    return steps[(steps["stage"] == stage) & at_load(steps, concurrency)]


def at_load(rows: pd.DataFrame, concurrency: float | None) -> pd.Series:
    """Which rows were measured at a concurrency (None: open loop)."""
    loads = rows["concurrency"]
    return loads.isna() if concurrency is None or pd.isna(concurrency) else loads == concurrency


def of_repeat(rows: pd.DataFrame, one: pd.Series) -> pd.DataFrame:
    """The rows of the same repeat of the same cell as `one`; both of any of a run's tables."""
    same = (rows["configuration"] == one["configuration"]) & (rows["repeat"] == one["repeat"])
    return rows[same & at_load(rows, one["concurrency"])]


def histogram(steps: pd.DataFrame) -> go.Figure:
    """How long the gaps of the loop are, a line for each configuration in `steps`, which are of one stage.

    Shares of the gaps in bins of equal width on the logarithmic axis; dotted: the median, which the legend names.
    """
    title = {"text": f"{subject(steps)}: gaps before steps of any kind"}
    figure = go.Figure(layout={"template": theme.LIGHT, "title": title})
    found = gaps(steps)
    if found.empty:
        return theme.empty(figure)
    low, high = found["gap_us"].min(), found["gap_us"].max() * 1.001
    edges = np.geomspace(low, high, min(BINS, 4 + 2 * math.isqrt(len(found))))
    edges = np.array([edges[0] ** 2 / edges[1], *edges, edges[-1] ** 2 / edges[-2]])  # an empty bin at either end
    looks = theme.style(found["configuration"])
    for name, own in by_configuration(found):
        look, median = looks[name], own["gap_us"].median()
        share = np.histogram(own["gap_us"], edges)[0] / len(own)
        figure.add_scatter(
            name=f"{name}: median {number(median)} µs of {len(own):,} gaps",
            x=np.sqrt(edges[:-1] * edges[1:]),
            y=share,
            mode="lines",
            line={"color": look["color"], "dash": look["dash"], "shape": "hvh", "width": 1.8},
            customdata=np.column_stack([edges[:-1], edges[1:]]),
            hovertemplate="%{customdata[0]:,.4~g} to %{customdata[1]:,.4~g} µs: %{y:.1%} of the gaps",
        )
        figure.add_vline(x=median, line={"color": look["color"], "dash": "dot", "width": 1})
    ticks = [digit * 10**power for power in range(-1, 10) for digit in ((1, 2, 5) if high < 200 * low else (1,))]
    figure.update_layout(height=360 + 14 * len(looks), showlegend=True)
    figure.update_xaxes(
        title="gap of the loop, µs", type="log", tickvals=ticks, range=[math.log10(edges[0]), math.log10(edges[-1])]
    )
    figure.update_yaxes(title="share of the gaps", tickformat=".0%", rangemode="tozero")
    return figure


def causes(stages: pd.DataFrame) -> go.Figure:
    """What the mean gap is made of: a bar for each configuration and concurrency of one stage in `stages`.

    Left, the gap of the loop, whose causes add up to it; right, the same with the waiting. The number at a bar's end is
    the whole. Cells in which no gap was measured have no bar.
    """
    title = {"text": f"{subject(stages, load=False)}: causes of the gap between two steps, mean"}
    columns = [f"gap_{cause}_us" for cause in CAUSES]
    measured = stages.dropna(subset=columns) if set(columns) <= set(stages) else stages.iloc[:0]
    if measured.empty:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    several = measured["configuration"].nunique() > 1
    loads = [load_label(load) for load in measured["concurrency"]]
    bars = [measured["configuration"].tolist(), loads] if several else loads
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=("the loop's gap", "with waiting"))
    for column, parts in enumerate((HOST, (*HOST, *(cause for cause in CAUSES if cause not in HOST))), 1):
        whole = sum(measured[f"gap_{cause}_us"] for cause in parts)
        unit, scale = ("ms", 1e-3) if whole.max() > LONG_US else ("µs", 1.0)
        for cause in parts:
            mean = measured[f"gap_{cause}_us"]
            figure.add_bar(
                name=CAUSE_NAMES[cause],
                legendgroup=cause,
                showlegend=column == 2,
                y=bars,
                x=mean * scale,
                orientation="h",
                marker={**look(cause), "line": {"width": 0}},
                customdata=np.column_stack([mean, mean / whole]),
                hovertemplate="%{customdata[0]:,.4~g} µs, %{customdata[1]:.1%} of the whole",
                row=1,
                col=column,
            )
        figure.add_scatter(
            y=bars,
            x=whole * scale,
            mode="text",
            text=[f" {number(value * scale)} {unit}" for value in whole],
            textposition="middle right",
            textfont={"size": 11},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
            row=1,
            col=column,
        )
        figure.update_xaxes(range=[0, 1.3 * whole.max() * scale], title=unit, col=column)
    height = max(60, 20 * len(measured))
    figure.update_layout(
        template=theme.LIGHT, title=title, barmode="stack", height=height + 190, margin_t=84, legend_y=-60 / height
    )
    figure.update_yaxes(autorange="reversed", type="multicategory" if several else "category")
    if not several:
        figure.update_yaxes(title="concurrency", col=1)
    return figure


def number(value: float) -> str:
    """A figure as text, with three digits at least."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def look(cause: str) -> dict:
    """The marker of a cause's bars."""
    color, pattern = CAUSE_LOOKS[cause]
    return {"color": color, "pattern": {"shape": pattern, "size": 5}}


def loads_of(frame: pd.DataFrame) -> list[float | None]:
    """The concurrencies of a table in ascending order, open loop last."""
    return sorted(frame["concurrency"].unique(), key=lambda load: math.inf if pd.isna(load) else load)


def subject(frame: pd.DataFrame, load: bool = True) -> str:
    """What the rows are of, for a title: their stage, and their concurrency if they have only one."""
    if frame.empty:
        return "Steps"
    first = frame.iloc[0]
    return f"{first['stage']}, concurrency {load_label(first['concurrency'])}" if load else str(first["stage"])
