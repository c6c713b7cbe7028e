"""Which steps were replays of captured graphs, and which ran operator by operator."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.views import theme

COUNTS = {
    "graph_replays": ("replayed", theme.BLUE, ""),
    "eager_steps": ("operator by operator", theme.ORANGE, "/"),
}
"""Columns of `Run.stages`: what they count, colour, pattern."""


def replays(stages: pd.DataFrame) -> go.Figure:
    """The share of each stage's steps that were replayed and that ran eager, a bar for each configuration.

    Counts are of all concurrencies in `stages` together, means of their repeats; those of Code2Wav are of its passes.
    Prefills are counted elsewhere (`captured_prefills`, `eager_prefills`).
    """
    title = {"text": "Steps replayed from a captured graph"}
    counted = stages.reindex(columns=["configuration", "stage", *COUNTS]).fillna(dict.fromkeys(COUNTS, 0))
    sums = counted.groupby(["stage", "configuration"], observed=True)[list(COUNTS)].sum().reset_index()
    sums = sums[sums[list(COUNTS)].sum(axis=1) > 0]
    if sums.empty:
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    names = [str(stage) for stage in sums["stage"].unique()]
    figure = make_subplots(1, len(names), shared_yaxes=True, subplot_titles=names)
    for column, (_, rows) in enumerate(sums.groupby("stage", observed=True), 1):
        whole = rows[list(COUNTS)].sum(axis=1)
        for name, (words, color, pattern) in COUNTS.items():
            figure.add_bar(
                name=words,
                legendgroup=name,
                showlegend=column == 1,
                y=rows["configuration"],
                x=rows[name] / whole,
                orientation="h",
                marker={"color": color, "pattern": {"shape": pattern, "size": 5}, "line": {"width": 0}},
                customdata=rows[name],
                hovertemplate=f"%{{customdata:,.4~g}} steps {words}, %{{x:.0%}}",
                row=1,
                col=column,
            )
    height = 34 * sums["configuration"].nunique()
    figure.update_layout(
        template=theme.LIGHT, title=title, barmode="stack", height=height + 180, margin_t=84, legend_y=-60 / height
    )
    figure.update_xaxes(tickformat=".0%", range=[0, 1], dtick=0.5)
    figure.update_yaxes(autorange="reversed", type="category")
    return figure
