"""What a step costs by the number of sequences in it: why batching pays, and what a captured step saves."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.views import theme
from omni_lab.views.figures import by_configuration

KINDS = ("decode", "vocode")
"""Steps that count here; what a prefill costs depends on its prompt."""

TICKS_MS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 3, 5)]
"""Marks of the logarithmic axis; plotly's own leave the reader to guess the power of ten."""

LEAST = 3
"""Steps that a point stands for at least."""


def step_times(steps: pd.DataFrame, each: bool = False) -> pd.DataFrame:
    """Quartiles of the time of a step, a row for each configuration, stage and size of the batch.

    Sizes from one power of two to the next are one row (1, 2, 3-4, 5-8, ...), `batch` their mean. `low_ms`,
    `median_ms` and `high_ms`: of the step, or with `each` of the step divided by its batch. Sizes with fewer than LEAST
    steps are left out.
    """
    rows = steps[steps["kind"].isin(KINDS) & (steps["batch"] > 0)]
    took_ms = (rows["end_ns"] - rows["start_ns"]) / 1e6
    rows = rows.assign(
        size=np.ceil(np.log2(rows["batch"].astype(float))), ms=took_ms / rows["batch"] if each else took_ms
    )
    groups = rows.groupby(["configuration", "stage", "size"], observed=True)
    found = groups.agg(
        batch=("batch", "mean"),
        low_ms=("ms", lambda ms: ms.quantile(0.25)),
        median_ms=("ms", "median"),
        high_ms=("ms", lambda ms: ms.quantile(0.75)),
        steps=("ms", "size"),
    )
    return found[found["steps"] >= LEAST].reset_index().drop(columns="size")


def by_batch(steps: pd.DataFrame, each: bool = False) -> go.Figure:
    """The median time of a step over its batch, a panel for each stage, a line for each configuration.

    With `each`, the step's time divided by its batch: what one sequence pays for one token, frame or chunk. Bars are
    the quartiles, both axes logarithmic. `step_times` says which steps count.
    """
    title = {"text": "Time of a step divided by its batch, ms" if each else "Time of a step, ms"}
    points = step_times(steps, each)
    if points.empty:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    stages = [stage for stage in steps["stage"].unique() if (points["stage"] == stage).any()]
    stages = sorted(stages, key=list(points["stage"].unique()).index)
    figure = make_subplots(1, len(stages), subplot_titles=[str(stage) for stage in stages])
    looks, shown = theme.style(steps["configuration"]), set()
    for column, stage in enumerate(stages, 1):
        for name, own in by_configuration(points[points["stage"] == stage]):
            look = looks[name]
            figure.add_scatter(
                name=name,
                legendgroup=name,
                showlegend=name not in shown,
                x=own["batch"],
                y=own["median_ms"],
                error_y={
                    "array": own["high_ms"] - own["median_ms"],
                    "arrayminus": own["median_ms"] - own["low_ms"],
                    "width": 3,
                    "thickness": 1,
                },
                mode="lines+markers",
                line={"color": look["color"], "dash": look["dash"]},
                marker={"color": look["color"], "symbol": look["symbol"], "size": 8},
                customdata=own["steps"],
                hovertemplate="batch %{x:.3~g}: %{y:.3~g} ms, median of %{customdata:,} steps",
                row=1,
                col=column,
            )
            shown.add(name)
    figure.update_layout(template=theme.LIGHT, title=title, height=380, margin_t=84)
    figure.update_xaxes(title="sequences in the step", type="log", tickvals=[1, 2, 4, 8, 16, 32, 64, 128])
    figure.update_yaxes(type="log", tickvals=TICKS_MS)
    return figure
