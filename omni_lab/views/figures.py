"""Figures that compare cells: one function each, a DataFrame in, a plotly figure out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme

LABELS = {
    "ttft_ms": ("Time to first token (TTFT)", "ms"),
    "audio_ttfp_ms": ("Time to first packet (TTFP)", "ms"),
    "e2el_ms": ("End-to-end latency (E2EL)", "ms"),
    "tpot_ms": ("Time per output token (TPOT)", "ms"),
    "itl_ms": ("Inter-token latency (ITL)", "ms"),
    "audio_rtf": ("Real-time factor (RTF)", ""),
    "audio_underrun_s": ("Playback underrun", "s"),
    "audio_duration_s": ("Audio per answer", "s"),
    "audio_continuity_ok_rate": ("Answers that play without a gap", "share"),
    "audio_throughput_s_per_s": ("Audio throughput", "s of audio / s"),
    "request_throughput_per_s": ("Request throughput", "requests / s"),
    "steady_request_throughput_per_s": ("Request throughput, first wave left out", "requests / s"),
    "output_throughput_tokens_per_s": ("Output throughput", "tokens / s"),
    "mean_dispatch_delay_ms": ("Dispatch delay", "ms"),
    "mean_batch": ("Mean batch", "sequences"),
    "step_ms": ("Step time", "ms"),
    "gap_us_median": ("Step gap, median", "µs"),
    "gap_us_p99": ("Step gap, 99th percentile", "µs"),
    "gap_us_p95": ("Step gap, 95th percentile", "µs"),
    "gap_input_us": ("Wait for input between steps", "µs"),
    "gap_slot_us": ("Wait for a slot between steps", "µs"),
    "gap_schedule_us": ("Step gap: scheduling", "µs"),
    "gap_payload_us": ("Step gap: building payloads", "µs"),
    "gap_send_us": ("Step gap: sending", "µs"),
    "gap_other_us": ("Step gap: other", "µs"),
    "step_prepare_us": ("Step: preparing inputs", "µs"),
    "step_forward_us": ("Step: forward", "µs"),
    "step_sample_us": ("Step: sampling", "µs"),
    "beside_us": ("Payloads beside the step loop", "µs a step"),
    "talker_gap_us_median": ("Talker step gap, median", "µs"),
    "busy_ratio": ("Busy share", ""),
    "tokens_per_s": ("Stage throughput", "tokens or frames / s"),
}
"""What a column is called in a picture, and its unit."""

POINTS = 2000
"""Points that one scatter plot shows at most; more are thinned evenly over their order."""

SAMPLES = 40
"""Single requests shown beside one box."""


def distribution(requests: pd.DataFrame, metric: str = "audio_ttfp_ms") -> go.Figure:
    """A latency's distribution by concurrency, a box for each configuration.

    Box: quartiles and median; whiskers: 1st and 99th percentile; dashed line: mean; dots: single requests, thinned
    evenly over their order. Requests in which `metric` was not measured (failed ones) are left out.
    """
    figure = titled(metric)
    measured = _measured(requests, metric)
    if measured.empty:
        return theme.empty(figure)
    looks = theme.style(measured["configuration"])
    for name, own in by_configuration(measured):
        look, groups = looks[name], [(load, cell[metric]) for load, cell in _by_load(own)]
        quantiles = np.array([np.quantile(values, [0.01, 0.25, 0.5, 0.75, 0.99]) for _, values in groups])
        low, first, middle, third, high = quantiles.T
        figure.add_box(
            name=name,
            x=[load for load, _ in groups],
            lowerfence=low,
            q1=first,
            median=middle,
            q3=third,
            upperfence=high,
            mean=[values.mean() for _, values in groups],
            y=[thin(values.sort_values(), SAMPLES).tolist() for _, values in groups],
            boxpoints="all",
            boxmean=True,
            jitter=0.6,
            pointpos=0,
            marker={"color": look["color"], "size": 3, "opacity": 0.5},
            line={"width": 1.5},
        )
    figure.update_layout(boxmode="group", showlegend=measured["configuration"].nunique() > 1)
    _load_axis(figure, measured)
    _value_axis(figure, measured[metric])
    if metric == "audio_rtf":
        _real_time(figure)
    return figure


def by_concurrency(cells: pd.DataFrame, metric: str = "audio_throughput_s_per_s") -> go.Figure:
    """A figure of the cells over concurrency, a line for each configuration; bars are the deviation over repeats."""
    figure = titled(metric)
    measured = _measured(cells, metric)
    if measured.empty:
        return theme.empty(figure)
    looks = theme.style(measured["configuration"])
    for name, own in by_configuration(measured):
        look, rows = looks[name], own.sort_values("concurrency")
        spread = rows.get(f"{metric}_std")
        figure.add_scatter(
            name=name,
            x=[load_label(value) for value in rows["concurrency"]],
            y=rows[metric],
            error_y={"array": spread, "width": 4, "thickness": 1} if spread is not None else None,
            mode="lines+markers",
            line={"color": look["color"], "dash": look["dash"]},
            marker={"color": look["color"], "symbol": look["symbol"], "size": 9},
        )
    _load_axis(figure, measured)
    figure.update_layout(showlegend=measured["configuration"].nunique() > 1)
    _value_axis(figure, measured[metric])
    if metric.endswith("audio_rtf"):
        _real_time(figure)
    return figure


def ttfp_rtf(requests: pd.DataFrame) -> go.Figure:
    """Every request's TTFP against its RTF: left is quick to speak, below the line keeps up with the listener.

    Colour is the configuration, the symbol the concurrency; requests of the first wave are drawn hollow.
    """
    figure = titled("audio_ttfp_ms", "First packet against real-time factor")
    measured = _measured(_measured(requests, "audio_ttfp_ms"), "audio_rtf")
    if measured.empty:
        return theme.empty(figure)
    colors = {name: look["color"] for name, look in theme.style(measured["configuration"]).items()}
    loads = sorted(measured["concurrency"].unique(), key=_load_order)
    symbols = {load: theme.SYMBOLS[i % len(theme.SYMBOLS)] for i, load in enumerate(loads)}
    share = min(1.0, POINTS / max(1, len(measured)))
    for (name, load), group in by_cell(measured):
        points = thin(group.sort_values("audio_ttfp_ms"), math.ceil(share * len(group)))
        first = points["first_wave"].fillna(False).astype(bool) if "first_wave" in points else [False] * len(points)
        symbol = symbols[load] if load in symbols else theme.SYMBOLS[0]
        figure.add_scatter(
            name=f"{name}, {load_label(load)}",
            x=points["audio_ttfp_ms"],
            y=points["audio_rtf"],
            mode="markers",
            marker={
                "color": colors[name],
                "symbol": [f"{symbol}-open" if early else symbol for early in first],
                "size": 8,
                "opacity": 0.9,
            },
            customdata=points["id"],
            hovertemplate="%{customdata}<br>TTFP %{x:.1f} ms, RTF %{y:.3f}",
        )
    ttfp, rtf = measured["audio_ttfp_ms"], measured["audio_rtf"]
    if wide(ttfp):
        ends = [math.log10(0.8 * ttfp.min()), math.log10(1.2 * ttfp.max())]
        figure.update_xaxes(title="TTFP, ms", type="log", dtick="D2", range=ends)
    else:
        figure.update_xaxes(title="TTFP, ms", range=[0, 1.05 * ttfp.max()])
    figure.update_yaxes(title="RTF", range=[0, 1.05 * max(1.05, rtf.max())])
    _real_time(figure)
    return figure


def stage_bars(stages: pd.DataFrame, metric: str = "busy_ratio") -> go.Figure:
    """One figure of every stage (busy share, batch, step time, gap) for each configuration and concurrency."""
    figure = titled(metric)
    measured = _measured(stages, metric)
    if measured.empty:
        return theme.empty(figure)
    several = measured["configuration"].nunique() > 1
    for i, (stage, rows) in enumerate(measured.groupby("stage", observed=True)):
        loads = [load_label(value) for value in rows["concurrency"]]
        figure.add_bar(
            name=str(stage),
            x=[rows["configuration"].tolist(), loads] if several else loads,
            y=rows[metric],
            marker={
                "color": theme.PALETTE[i % len(theme.PALETTE)],
                "pattern": {"shape": ("", "/", ".", "x")[i % 4], "fillmode": "overlay", "fgopacity": 0.5, "size": 6},
            },
        )
    if several:
        figure.update_layout(legend_y=-0.3)
    else:
        _load_axis(figure, measured)
    if metric == "busy_ratio":
        figure.update_yaxes(tickformat=".0%")
    return figure


def by_configuration(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Name and rows of each configuration, in the order of the rows."""
    return iter(frame.groupby("configuration", sort=False, observed=True))


def by_cell(frame: pd.DataFrame) -> Iterator[tuple[tuple[str, float | None], pd.DataFrame]]:
    """Configuration and concurrency (NaN: open loop) of each cell, and its rows, in the order of the rows."""
    return iter(frame.groupby(["configuration", "concurrency"], sort=False, dropna=False, observed=True))


def load_label(concurrency: float | None) -> str:
    """A cell's load in words: its concurrency, or "open" where requests arrive by themselves."""
    return "open" if concurrency is None or pd.isna(concurrency) else f"{concurrency:g}"


def thin(values: pd.DataFrame | pd.Series, most: int) -> pd.DataFrame | pd.Series:
    """At most `most` rows, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return values
    return values.iloc[np.unique(np.linspace(0, len(values) - 1, max(most, 2)).round().astype(int))]


def wide(values: pd.Series) -> bool:
    """Whether values are positive and so far apart that they want a logarithmic axis."""
    return values.min() > 0 and values.quantile(0.99) > 20 * values.min()


def titled(metric: str, title: str | None = None) -> go.Figure:
    """An empty figure whose title is `title`, else what LABELS calls the metric."""
    base = metric.removeprefix("mean_") if metric not in LABELS else metric
    name, unit = LABELS.get(base, (metric, ""))
    name = name if base == metric else f"{name}, mean"
    heading = title or (f"{name}, {unit}" if unit else name)
    return go.Figure(layout={"template": theme.LIGHT, "title": {"text": heading}, "height": 360})


def _measured(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    return frame[frame[metric].notna()] if metric in frame else frame.iloc[:0].assign(**{metric: []})


def _load_order(concurrency: float | None) -> float:
    return math.inf if concurrency is None or pd.isna(concurrency) else float(concurrency)


def _by_load(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    groups = frame.groupby("concurrency", dropna=False, sort=False)
    return [(load_label(load), group) for load, group in sorted(groups, key=lambda item: _load_order(item[0]))]


def _load_axis(figure: go.Figure, frame: pd.DataFrame) -> None:
    loads = sorted(frame["concurrency"].unique(), key=_load_order)
    figure.update_xaxes(
        title="concurrency", type="category", categoryorder="array", categoryarray=[load_label(v) for v in loads]
    )


def _value_axis(figure: go.Figure, values: pd.Series) -> None:
    """From zero, or logarithmic where the values are far apart."""
    if wide(values):
        figure.update_yaxes(type="log", dtick="D2")
    else:
        figure.update_yaxes(rangemode="tozero")


def _real_time(figure: go.Figure) -> None:
    """A line at RTF 1. plotly places shapes on a log axis by value, but annotations by its logarithm."""
    level = 0 if figure.layout.yaxis.type == "log" else 1
    figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=1, y1=1, line={"color": theme.GREY, "dash": "dash"})
    figure.add_annotation(
        text="real time", xref="paper", x=1, y=level, xanchor="right", yanchor="bottom", showarrow=False, font_size=11
    )
