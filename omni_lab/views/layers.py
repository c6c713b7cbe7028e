"""What each layer is worth, asked twice: added on top of the layers below it, and taken out of the full stack."""

from __future__ import annotations

import math
from itertools import pairwise

import pandas as pd
import plotly.graph_objects as go

from omni_lab.comparison import more_is_better
from omni_lab.frames import Run
from omni_lab.metrics.relative import Ratio, paired_ratio
from omni_lab.views import theme
from omni_lab.views.figures import LABELS, load_label
from omni_lab.views.ladder import published
from omni_lab.views.pieces import repeats
from omni_lab.views.steps import at_load

ADDED, WITHOUT, THEIRS = "added to the rungs below", "taken out of the full stack", "published, added"
LOOKS = {ADDED: (theme.BLUE, "circle"), WITHOUT: (theme.GREEN, "diamond"), THEIRS: (theme.ORANGE, "square-open")}
"""The three ways in which a layer's worth is known, and how each is drawn."""

SAME = {"batching": "batch", "graphs": "cuda_graph", "stateful_code2wav": "stateful"}
"""Where leaving a toggle out (`no_<toggle>`) undoes a rung of another name."""


def worth(ladder: Run, without: Run, metric: str, concurrency: float | None = 1) -> pd.DataFrame:
    """The factor by which each layer improves a figure, above 1 where it helps: columns layer, how, factor, low, high.

    ADDED: each rung of `ladder` against the rung before it. WITHOUT: the first configuration of `without` (the full
    stack) against itself without a layer, which is called `no_<layer>`. THEIRS: the published rungs. Intervals are of
    the paired repeats, at 95 %; NaN where there are none.
    """
    rungs = list(dict.fromkeys(ladder.cells["configuration"].astype(str)))
    rows = repeats(ladder)
    found = [_row(rung, ADDED, _factor(rows, rung, below, metric, concurrency)) for below, rung in pairwise(rungs)]
    rows = repeats(without)
    whole, *others = dict.fromkeys(without.cells["configuration"].astype(str))
    for name in others:
        layer = name.removeprefix("no_")
        found.append(_row(SAME.get(layer, layer), WITHOUT, _factor(rows, whole, name, metric, concurrency)))
    theirs = published()
    theirs = theirs[theirs["concurrency"] == concurrency].reset_index(drop=True)
    if metric in theirs:
        ratio = theirs[metric] / theirs[metric].shift()
        ratio = ratio if more_is_better(metric) else 1 / ratio
        pairs = zip(theirs["configuration"][1:], ratio[1:], strict=True)
        found += [_row(rung, THEIRS, Ratio(factor, None, None, "")) for rung, factor in pairs]
    frame = pd.DataFrame(found, columns=["layer", "how", "factor", "low", "high"])
    layers = dict.fromkeys([rungs[0], *rungs[1:], *frame["layer"]])
    frame["layer"] = pd.Categorical(frame["layer"], categories=list(layers), ordered=True)
    return frame.dropna(subset=["factor"]).astype({"low": float, "high": float})


def figure(frame: pd.DataFrame, metric: str, concurrency: float | None = 1) -> go.Figure:
    """The rows of `worth`: a line for each layer, on a logarithmic axis; the dashed line is "no difference"."""
    name, _ = LABELS.get(metric.removeprefix("mean_"), (metric, ""))
    title = {"text": f"{name}: how many times better each layer makes it, concurrency {load_label(concurrency)}"}
    drawn = go.Figure(layout={"template": theme.LIGHT, "title": title})
    if frame.empty:
        return theme.empty(drawn)
    layers = [layer for layer in frame["layer"].cat.categories if (frame["layer"] == layer).any()]
    place = {layer: row for row, layer in enumerate(layers)}
    for shift, (how, (color, symbol)) in zip((-0.18, 0.0, 0.18), LOOKS.items(), strict=True):
        own = frame[frame["how"] == how]
        drawn.add_scatter(
            name=how,
            x=own["factor"],
            y=[place[layer] + shift for layer in own["layer"]],
            mode="markers",
            error_x={
                "array": own["high"] - own["factor"],
                "arrayminus": own["factor"] - own["low"],
                "width": 4,
                "thickness": 1.2,
            },
            marker={"color": color, "symbol": symbol, "size": 10, "line": {"color": color, "width": 2}},
            customdata=own[["layer", "low", "high"]].astype({"layer": str}),
            hovertemplate="%{customdata[0]}: x%{x:.3g} (95 % interval %{customdata[1]:.3g} to %{customdata[2]:.3g})",
        )
    drawn.add_vline(x=1, line={"color": theme.GREY, "dash": "dash", "width": 1})
    height = 40 * len(layers)
    drawn.update_layout(height=height + 170, legend_y=-70 / height)
    ends = pd.concat([frame["factor"], frame["low"], frame["high"]])
    reach = [math.log10(min(0.7, ends.min())) - 0.05, math.log10(max(1.5, ends.max())) + 0.08]
    ticks = [one * 10.0**power for power in range(-3, 4) for one in (1, 2, 5)]
    drawn.update_xaxes(type="log", range=reach, tickvals=ticks, title="factor; right of 1 the layer helps")
    drawn.update_yaxes(
        tickvals=list(place.values()),
        ticktext=[layer.replace("_", " ") for layer in layers],
        range=[len(layers) - 0.5, -0.5],
        zeroline=False,
    )
    return drawn


def _factor(rows: pd.DataFrame, better: str, other: str, metric: str, concurrency: float | None) -> Ratio | None:
    """By which factor `better` is better than `other`, over the repeats that both have; None without any."""
    if metric not in rows:
        return None
    table = rows[at_load(rows, concurrency)].pivot(index="repeat", columns="configuration", values=metric)
    pair = table.reindex(columns=[better, other]).dropna().astype(float)
    values, base = pair[better].tolist(), pair[other].tolist()
    return paired_ratio(values, base) if more_is_better(metric) else paired_ratio(base, values)


def _row(layer: str, how: str, ratio: Ratio | None) -> tuple[str, str, float | None, float | None, float | None]:
    return (layer, how, ratio.ratio, ratio.low, ratio.high) if ratio else (layer, how, None, None, None)
