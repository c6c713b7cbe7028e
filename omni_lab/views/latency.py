"""Latency of single requests: shares and percentiles, and how many meet what a listener may expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.figures import LABELS, by_cell, load_label, thin, titled, wide
from omni_lab.views.steps import loads_of, number

CORNERS = 300
"""Points of one line of `ecdf` at most."""

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to be good: TTFP in ms and RTF, each at most."""

    ttfp_ms: float
    rtf: float


def ecdf(requests: pd.DataFrame, metric: str = "audio_ttfp_ms", percentile: float = 95.0) -> go.Figure:
    """The share of the requests at or below each value, a line for each configuration and concurrency.

    Colour is the configuration, the dash the concurrency. The marks say where each line reaches `percentile`, and the
    legend names the value. Requests in which `metric` was not measured (failed ones) are left out.
    """
    figure = titled(metric)
    measured = requests[requests[metric].notna()] if metric in requests else requests.iloc[:0]
    if measured.empty:
        return theme.empty(figure)
    unit = f" {LABELS[metric][1]}" if LABELS.get(metric, ("", ""))[1] else ""
    looks = theme.style(measured["configuration"])
    loads = loads_of(measured)
    dashes = {load_label(load): theme.DASHES[i % len(theme.DASHES)] for i, load in enumerate(loads)}
    for (name, load), cell in by_cell(measured):
        color, values = looks[name]["color"], cell[metric].sort_values()
        at = np.percentile(values, percentile)
        line = pd.DataFrame({"x": values.to_numpy(), "y": np.arange(1, len(values) + 1) / len(values)})
        line = thin(line, CORNERS)
        label = f"{name}, {load_label(load)}" if len(loads) > 1 else str(name)
        figure.add_scatter(
            name=f"{label}: p{percentile:g} {number(at)}{unit}",
            x=line["x"],
            y=line["y"],
            mode="lines",
            legendgroup=label,
            line={"color": color, "dash": dashes[load_label(load)], "shape": "hv", "width": 1.8},
            hovertemplate=f"%{{y:.1%}} at most %{{x:,.4~g}}{unit}",
        )
        figure.add_scatter(
            name=label,
            x=[at],
            y=[percentile / 100],
            mode="markers",
            legendgroup=label,
            showlegend=False,
            marker={"color": color, "symbol": looks[name]["symbol"], "size": 9},
            hovertemplate=f"p{percentile:g}: %{{x:,.4~g}}{unit}",
        )
    figure.add_hline(y=percentile / 100, line={"color": theme.GREY, "dash": "dot", "width": 1})
    figure.update_layout(showlegend=True, height=360 + 15 * (len(figure.data) // 2))
    figure.update_yaxes(title="share of the requests", tickformat=".0%", range=[-0.02, 1.02])
    if wide(measured[metric]):
        figure.update_xaxes(type="log", dtick="D2", title=unit.strip())
    else:
        figure.update_xaxes(rangemode="tozero", title=unit.strip())
    return figure


def percentiles(requests: pd.DataFrame, metric: str = "audio_ttfp_ms") -> pd.DataFrame:
    """A row for each cell with the number of requests measured, their mean and PERCENTILES (interpolated)."""
    rows = [
        {
            "configuration": name,
            "concurrency": load,
            "requests": len(values),
            "mean": values.mean(),
            **dict(zip([f"p{p}" for p in PERCENTILES], np.percentile(values, PERCENTILES), strict=True)),
        }
        for (name, load), cell in by_cell(requests)
        if len(values := cell[metric].dropna() if metric in cell else pd.Series(dtype=float))
    ]
    columns = ["configuration", "concurrency", "requests", "mean", *(f"p{p}" for p in PERCENTILES)]
    return pd.DataFrame(rows, columns=columns)


def goodput(requests: pd.DataFrame, cells: pd.DataFrame, limits: Limits) -> pd.DataFrame:
    """A row for each cell with its `requests`, the `share` of them that keep the limits, and `goodput_per_s`.

    A request that failed, or that gave no audio, keeps none. Goodput is the cell's request throughput times the good
    requests for each completed one (Zhong et al., "DistServe", OSDI 2024, name it so).
    """
    throughput = {
        (row["configuration"], load_label(row["concurrency"])): row.get("request_throughput_per_s", np.nan)
        for _, row in cells.iterrows()
    }
    measured = requests.reindex(columns=[*requests.columns.union(["audio_ttfp_ms", "audio_rtf", "e2el_ms"])])
    good = (measured["audio_ttfp_ms"] <= limits.ttfp_ms) & (measured["audio_rtf"] <= limits.rtf)
    rows = []
    for (name, load), cell in by_cell(measured.assign(good=good & measured["e2el_ms"].notna())):
        done = cell["e2el_ms"].notna().sum()
        rate = throughput.get((name, load_label(load)), np.nan) * cell["good"].sum() / done if done else np.nan
        facts = {"requests": len(cell), "share": cell["good"].mean(), "goodput_per_s": rate}
        rows.append({"configuration": name, "concurrency": load, **facts})
    found = pd.DataFrame(rows, columns=["configuration", "concurrency", "requests", "share", "goodput_per_s"])
    return found.astype({"configuration": requests["configuration"].dtype})


def goodput_bars(found: pd.DataFrame, limits: Limits) -> go.Figure:
    """What `goodput` gave: the share of the requests that keep the limits, a bar for each cell, its text the rate."""
    title = f"Good answers: TTFP up to {number(limits.ttfp_ms)} ms, RTF up to {limits.rtf:.2f}"
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": title}, "height": 360})
    if found.empty:
        return theme.empty(figure)
    looks = theme.style(found["configuration"])
    several = found["concurrency"].nunique(dropna=False) > 1
    for name, own in found.groupby("configuration", observed=True, sort=False):
        figure.add_bar(
            name=str(name),
            x=[load_label(load) for load in own["concurrency"]] if several else [str(name)],
            y=own["share"],
            text=["" if pd.isna(rate) else f"{number(rate)}/s" for rate in own["goodput_per_s"]],
            textposition="outside",
            cliponaxis=False,
            marker={"color": looks[name]["color"]},
            customdata=own["requests"],
            hovertemplate="%{y:.1%} of %{customdata:,} requests are good: %{text}",
        )
    figure.update_layout(showlegend=several)
    figure.update_xaxes(type="category", title="concurrency" if several else None)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.08], title="share of the requests")
    return figure


def region(limits: Limits) -> list[dict[str, Any]]:
    """Shapes that mark, in `figures.ttfp_rtf`, where the good answers lie."""
    corner = {"type": "rect", "x0": 1e-3, "y0": 0, "x1": limits.ttfp_ms, "y1": limits.rtf}
    return [{**corner, "fillcolor": theme.GREEN, "opacity": 0.12, "line": {"color": theme.GREEN}, "layer": "below"}]
