"""The ladder: what each layer brings, beside the published figures of the same layers."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.resources import files
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import yaml
from plotly.subplots import make_subplots

from omni_lab.views import theme
from omni_lab.views.figures import LABELS, load_label

OURS, PUBLISHED = "this run", "published"
METRICS = ("request_throughput_per_s", "mean_audio_ttfp_ms", "mean_audio_rtf")
"""What the published ladder states, named as in `Run.cells`."""

GAP = "talker_gap_us_median"
"""The Talker's step gap, from `Run.stages`; no such figure is published for each rung."""

COMPARABLE = (
    "Comparable: the order of the rungs and the factor from one rung to the next; equal factors are equal distances on "
    "the logarithmic axis. Not comparable: the figures, which are of another model, machine and length of "
    "answer. Where a rung has no published figure, there is none to compare with."
)


@lru_cache
def _source() -> dict[str, Any]:
    return yaml.safe_load(files("omni_lab.views").joinpath("published.yaml").read_text("utf-8"))


def provenance() -> str:
    """Where the published figures come from, and under which conditions they were measured."""
    return f"Published: {_source()['source']}: {_source()['setting']}."


def published() -> pd.DataFrame:
    """The published ladder in the shape of `Run.cells`: a row for each rung and concurrency."""
    content = _source()
    return pd.DataFrame(
        {"configuration": rung, "concurrency": load} | {metric: values[index] for metric, values in columns.items()}
        for rung, columns in content["rungs"].items()
        for index, load in enumerate(content["concurrency"])
    )


def is_ladder(cells: pd.DataFrame) -> bool:
    """Whether a run climbs: at least two of its configurations are rungs of the published ladder."""
    return len(set(cells["configuration"]) & set(_source()["rungs"])) > 1


def figure(cells: pd.DataFrame, metric: str = METRICS[0]) -> go.Figure:
    """One figure over the rungs of a run, a panel for each concurrency; bars are the deviation over repeats.

    The axis is logarithmic and shared by all panels.
    """
    name, unit = LABELS[metric.removeprefix("mean_")]
    measured = cells[cells[metric].notna() & (cells[metric] > 0)] if metric in cells else cells.iloc[:0]
    title = {"text": f"{name}, {unit}" if unit else name}
    if measured.empty:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    loads = sorted(measured["concurrency"].unique(), key=lambda load: math.inf if pd.isna(load) else load)
    rungs = list(dict.fromkeys(cells["configuration"]))
    plot = make_subplots(
        1, len(loads), shared_yaxes=True, subplot_titles=[f"concurrency {load_label(load)}" for load in loads]
    )
    theirs = published()
    for column, load in enumerate(loads, 1):
        here = theirs[(theirs["concurrency"] == load) & theirs["configuration"].isin(rungs)]
        if metric in theirs and not here.empty:
            plot.add_trace(_line(PUBLISHED, here, metric, theme.ORANGE, "square", column == 1), 1, column)
        own = measured[measured["concurrency"].isna() if pd.isna(load) else measured["concurrency"] == load]
        plot.add_trace(_line(OURS, own, metric, theme.BLUE, "circle", column == 1), 1, column)
    plot.update_layout(template=theme.LIGHT, title=title, height=420, legend_y=-0.45, margin_t=84)
    plot.update_xaxes(type="category", categoryorder="array", categoryarray=rungs, tickangle=-60)
    plot.update_yaxes(type="log", dtick="D2")
    return plot


def _line(name: str, rows: pd.DataFrame, metric: str, color: str, symbol: str, legend: bool) -> go.Scatter:
    spread = rows.get(f"{metric}_std")
    return go.Scatter(
        name=name,
        legendgroup=name,
        showlegend=legend,
        x=rows["configuration"],
        y=rows[metric],
        error_y={"array": spread, "width": 4, "thickness": 1} if spread is not None else None,
        mode="lines+markers",
        line={"color": color, "dash": "solid" if name == OURS else "dot"},
        marker={"color": color, "symbol": symbol, "size": 9},
    )
