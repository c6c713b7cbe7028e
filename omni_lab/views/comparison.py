"""Ratios of a comparison as points with intervals around 1; what is inside the noise is grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.comparison import DIFFERENT, UNPAIRED, more_is_better
from omni_lab.metrics.relative import FEW, NOISE
from omni_lab.views import theme
from omni_lab.views.figures import LABELS, load_label
from omni_lab.views.tables import MISSING, Table

FIGURES = ("request_throughput_per_s", "mean_audio_ttfp_ms", "mean_audio_rtf", "talker.gap_us_median")
"""What is shown unless asked otherwise: figures of the cell, or of a stage behind the stage's name."""

LOOKS = {
    "better": (theme.BLUE, ""),
    "worse": (theme.VERMILION, ""),
    "different": (theme.PURPLE, ""),
    NOISE: (theme.GREY, ""),
    FEW: (theme.GREY, "-open"),
    DIFFERENT: (theme.GREY, "-open"),
}
"""Colour and symbol of each outcome. "different" is for figures that are neither better high nor low."""


TICKS = (
    [0.9, 0.95, 1, 1.05, 1.1],
    [0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4],
    [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4],
    [10.0**power * digit for power in range(-4, 4) for digit in (1, 2, 5)],
    [10.0**power for power in range(-6, 7)],
    [100.0**power for power in range(-6, 7)],
)
"""Round factors for axes of growing length."""

LABEL = 0.1
"""Share of the picture's width that a tick's label needs."""

FAR = 30
"""How far from its ratio an interval is followed."""


def figure(comparison: pd.DataFrame, figures: Sequence[str] = FIGURES) -> go.Figure:
    """The rows of `omni_lab.compare`: a panel for each figure, a line for each configuration, a symbol for each load.

    The axes are logarithmic, so that twice and half are equally far from 1. Rows without a ratio are left out.
    """
    found = comparison[comparison["ratio"].notna()]
    parts = {name: _rows(found, name) for name in figures}
    parts = {name: rows for name, rows in parts.items() if not rows.empty}
    against = sorted(set(comparison["against"].dropna()))
    title = f"Ratio to {' and '.join(against)}, 95 % interval" if against else "Ratios"
    if not parts:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": {"text": title}}))
    shown, names = pd.concat(parts.values()), line_names(comparison)
    lines = list(dict.fromkeys(names[names.index.isin(shown.index)]))
    loads = sorted(shown["concurrency"].dropna().unique()) + ([pd.NA] if shown["concurrency"].isna().any() else [])
    plot = make_subplots(1, len(parts), shared_yaxes=True, subplot_titles=[_heading(name) for name in parts])
    places = {line: place for place, line in enumerate(reversed(lines))}
    step = 0.7 / len(loads)
    for column, (name, rows) in enumerate(parts.items(), 1):
        for number, load in enumerate(loads):
            own = rows[rows["concurrency"].isna() if pd.isna(load) else rows["concurrency"].eq(load).fillna(False)]
            offset = ((len(loads) - 1) / 2 - number) * step
            for outcome, group in own.groupby(own.apply(_outcome, axis=1)) if len(own) else ():
                heights = [places[line] + offset for line in names[group.index]]
                plot.add_trace(_points(name, outcome, load, number, group, heights), 1, column)
        plot.update_xaxes(_axis(rows, len(parts)), col=column)
        plot.add_vline(x=1, line={"color": theme.GREY, "dash": "dash", "width": 1}, row=1, col=column)
    for outcome in LOOKS:
        if any(trace.name == outcome for trace in plot.data):
            plot.add_trace(_key(outcome, *LOOKS[outcome], theme.SYMBOLS[0]), 1, 1)
    for number, load in enumerate(loads if len(loads) > 1 else ()):
        label = f"{load_label(load)} in flight" if pd.notna(load) else "open loop"
        plot.add_trace(_key(label, theme.GREY, "", theme.SYMBOLS[number % len(theme.SYMBOLS)]), 1, 1)
    plot.update_layout(
        template=theme.LIGHT,
        title={"text": title, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 10}},
        height=170 + len(lines) * max(30, 16 * len(loads)),
        margin={"t": 92, "b": 70},
        legend={"y": 0, "yref": "container", "yanchor": "bottom"},
    )
    plot.update_yaxes(range=[-0.6, len(lines) - 0.4], zeroline=False)
    plot.update_yaxes(tickvals=list(places.values()), ticktext=list(places), col=1)
    return plot


def summary(comparison: pd.DataFrame, figures: Sequence[str] = FIGURES) -> Table:
    """The same rows as a table, with those that have no ratio."""
    names = line_names(comparison)
    head = ["configuration", "in flight", "figure", "value", "base", "ratio", "95 % interval", "verdict"]
    rows = []
    for name in figures:
        for _, row in _rows(comparison, name).iterrows():
            interval = MISSING if pd.isna(row["low"]) else f"{row['low']:.3g} to {row['high']:.3g}"
            kind = _outcome(row) if _outcome(row) in ("better", "worse") else "figure"
            texts = [load_label(row["concurrency"]), f"{_name(name)}{_unit(name)}"]
            texts += [MISSING if pd.isna(row[key]) else f"{row[key]:.4g}" for key in ("value", "base")]
            texts += [MISSING if pd.isna(row["ratio"]) else f"{row['ratio']:.3g}x", interval]
            word = row["verdict"] if kind == "figure" else f"{row['verdict']}: {kind}"
            cells = [{"text": text, "kind": "missing" if text == MISSING else "figure"} for text in texts]
            rows.append([names[row.name], *cells, {"text": word, "kind": kind}])
    return {"head": head, "rows": rows}


def _axis(rows: pd.DataFrame, panels: int) -> dict[str, Any]:
    """A logarithmic axis over all intervals and 1, with ticks at round factors, fewer beside other panels.

    Of an interval that says next to nothing (two repeats that disagree give such) the far end lies outside.
    """
    widest = rows["low"].clip(lower=rows["ratio"] / FAR), rows["high"].clip(upper=rows["ratio"] * FAR)
    edges = pd.concat([rows["ratio"], *widest, pd.Series([1.0])]).dropna()
    low, high = math.log10(edges.min()), math.log10(edges.max())
    margin = 0.02 + 0.06 * (high - low)
    low, high = low - margin, high + margin
    reaching = [one for one in TICKS if math.log10(one[0]) < low + 0.2 and high - 0.2 < math.log10(one[-1])] or TICKS
    inside = [[one for one in factors if low < math.log10(one) < high] for factors in reaching]
    ticks = max((_apart(found, LABEL * panels * (high - low)) for found in inside), key=len)
    return {
        "type": "log",
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [f"x{one:g}" for one in ticks],
        "tickangle": 0,
    }


def _apart(ticks: Sequence[float], least: float) -> list[float]:
    """The ticks that are `least` decades from each other, those nearest to 1 first."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda one: abs(math.log10(one))):
        if all(abs(math.log10(tick / other)) >= least for other in kept):
            kept.append(tick)
    return sorted(kept)


def _rows(comparison: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of a figure."""
    stage, _, figure = name.rpartition(".")
    of_stage = comparison["stage"] == stage if stage else comparison["stage"].isna()
    return comparison[of_stage & (comparison["figure"] == figure)]


def line_names(comparison: pd.DataFrame) -> pd.Series:
    """What each row's line is called: its configuration, and its run where that is not clear without."""
    names, unpaired = comparison["configuration"].astype(str), comparison["compared"] == UNPAIRED
    several = comparison.groupby("configuration", observed=True)["run"].transform("nunique") > 1
    names = names.where(~several & ~unpaired, names + " of " + comparison["run"])
    return names.where(~unpaired, names + ", unpaired")


def _outcome(row: pd.Series) -> str:
    if row["verdict"] in (NOISE, FEW, DIFFERENT):
        return row["verdict"]
    return "different" if pd.isna(row["better"]) else "better" if row["better"] else "worse"


def _points(name: str, outcome: str, load: float, number: int, rows: pd.DataFrame, heights: list[float]) -> go.Scatter:
    color, style = LOOKS[outcome]
    return go.Scatter(
        name=outcome,
        showlegend=False,
        x=rows["ratio"],
        y=heights,
        error_x={
            "array": rows["high"] - rows["ratio"],
            "arrayminus": rows["ratio"] - rows["low"],
            "width": 3,
            "thickness": 1.5,
        },
        mode="markers",
        marker={"color": color, "symbol": theme.SYMBOLS[number % len(theme.SYMBOLS)] + style, "size": 9},
        customdata=[_told(row) for _, row in rows.iterrows()],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _told(row: pd.Series) -> str:
    interval = "" if pd.isna(row["low"]) else f" ({row['low']:.3g} to {row['high']:.3g})"
    load = "open loop" if pd.isna(row["concurrency"]) else f"{row['concurrency']} in flight"
    told = [
        f"<b>{row['configuration']}</b>, {load}: {row['verdict']}",
        f"{row['value']:.4g} against {row['base']:.4g} of {row['against']}: x{row['ratio']:.3g}{interval}",
        f"{row['compared']}, {row['repeats']} repeats" if row["repeats"] > 1 else "one repeat, so no interval",
    ]
    return "<br>".join([*told, *(row["differs"].split("; ") if row["differs"] else ())])


def _name(name: str) -> str:
    """What a figure is called, its stage in front."""
    stage, _, figure = name.rpartition(".")
    base = figure.removeprefix("mean_").removeprefix("p99_")
    label = LABELS.get(base, (base, ""))[0] + (", 99th percentile" if figure.startswith("p99_") else "")
    return f"{stage.capitalize()}: {label[0].lower()}{label[1:]}" if stage else label


def _unit(name: str) -> str:
    base = name.rpartition(".")[2].removeprefix("mean_").removeprefix("p99_")
    unit = LABELS.get(base, ("", ""))[1]
    return f", {unit}" if unit else ""


def _heading(name: str) -> str:
    more = more_is_better(name.rpartition(".")[2])
    return f"{_name(name)}<br><sup>{'' if more is None else 'better →' if more else '← better'}</sup>"


def _key(label: str, color: str, style: str, symbol: str) -> go.Scatter:
    """An entry of the legend that belongs to no single trace."""
    return go.Scatter(
        x=[None], y=[None], name=label, mode="markers", marker={"color": color, "symbol": symbol + style, "size": 9}
    )
