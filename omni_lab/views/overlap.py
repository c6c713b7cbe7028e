"""Before and after: one request's stages on one time axis, and what they do at the same time."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.figures import by_configuration
from omni_lab.views.gantt import draw_steps, merged
from omni_lab.views.request import audio_arrivals, of_request, stage_span
from omni_lab.views.steps import number, of_repeat


def typical(requests: pd.DataFrame, concurrency: float = 1) -> pd.DataFrame:
    """Of each configuration the completed request whose end-to-end latency is the median at this concurrency."""
    done = requests[(requests["concurrency"] == concurrency) & requests["e2el_ms"].notna()]
    middle = [own.sort_values("e2el_ms").iloc[(len(own) - 1) // 2] for _, own in by_configuration(done)]
    return pd.DataFrame(middle, columns=requests.columns).reset_index(drop=True)


def overlap(requests: pd.DataFrame, steps: pd.DataFrame, chunks: pd.DataFrame) -> go.Figure:
    """The stages of each of `requests` (one for each configuration, see `typical`), all in ms since it was sent.

    A row for each stage with the steps in which it had the request; a star is the first audio at the client, triangles
    what follows. Stages that work one after the other leave a staircase; stages that overlap lie on top of each other.
    """
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": "One request"}, "barmode": "overlay"})
    lanes = [(request, _steps_of(request, steps, chunks)) for _, request in requests.iterrows()]
    lanes = [(request, mine) for request, mine in lanes if len(mine)]
    if not lanes:
        return theme.empty(figure)
    places, words, parts = [], [], []
    for request, mine in lanes:
        top = places[-1] + 1.8 if places else 0.0
        stages = list(mine.sort_values("start")["stage"].unique())
        for row, stage in enumerate(stages):
            of_stage = mine[mine["stage"] == stage].assign(row=top + row, opacity=1.0)
            parts += [merged(kind) for _, kind in of_stage.groupby("kind")]
        places += [top + row for row in range(len(stages) + 1)]
        words += [*map(str, stages), "client"]
        _arrivals(figure, request, places[-1], legend=len(words) == len(stages) + 1)
        heading = f"<b>{request['configuration']}</b>: first audio after {number(request['audio_ttfp_ms'])} ms"
        figure.add_annotation(text=heading, x=0, xref="paper", xanchor="left", y=top - 0.75, showarrow=False)
    draw_steps(figure, pd.concat(parts))
    height, end = 34 * (places[-1] + 1), requests["e2el_ms"].max()
    figure.update_layout(height=height + 140, legend_y=-60 / height)
    figure.update_xaxes(title="ms since the request was sent", range=[-0.01 * end, 1.02 * end])
    figure.update_yaxes(tickvals=places, ticktext=words, range=[places[-1] + 0.6, -1.2], showgrid=False, zeroline=False)
    return figure


def shares(requests: pd.DataFrame, steps: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """How much of each request's life the stages were at work, and how much of that at the same time.

    A row for each of `requests`: `configuration`, `ttfp_ms`, `e2el_ms`, `busy_ms` (the stages' steps added up) and
    `together_ms` (of the time in which at least two stages were in a step).
    """
    rows = []
    for _, request in requests.iterrows():
        mine = _steps_of(request, steps, chunks)
        marks = np.concatenate([mine["start"], mine["end"]])
        order = np.argsort(marks, kind="stable")
        at_work = np.cumsum(np.repeat([1, -1], len(mine))[order])
        spans = np.diff(marks[order], append=marks.max() if len(marks) else 0.0)
        rows.append(
            {
                "configuration": request["configuration"],
                "ttfp_ms": request["audio_ttfp_ms"],
                "e2el_ms": request["e2el_ms"],
                "busy_ms": (mine["end"] - mine["start"]).sum(),
                "together_ms": spans[at_work > 1].sum(),
            }
        )
    return pd.DataFrame(rows, columns=["configuration", "ttfp_ms", "e2el_ms", "busy_ms", "together_ms"])


def _steps_of(request: pd.Series, steps: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """The steps that each stage took while it had the request; `start` and `end` in ms since it was sent."""
    mine = of_repeat(steps, request)
    start, end = ((mine[f"{side}_ns"] - request["send_ns"]) / 1e6 for side in ("start", "end"))
    handoffs = of_request(chunks, request)
    times = {name: (handoffs[f"{name}_ns"] - request["send_ns"]) / 1e6 for name in ("produced", "received")}
    handoffs = handoffs.assign(**times)
    spans = {stage: stage_span(str(stage), handoffs, request["e2el_ms"]) for stage in mine["stage"].unique()}
    since, until = (mine["stage"].map({stage: span[i] for stage, span in spans.items()}).astype(float) for i in (0, 1))
    return mine.assign(start=start, end=end)[(end > since) & (start <= until)]


def _arrivals(figure: go.Figure, request: pd.Series, row: float, legend: bool) -> None:
    """The chunks of audio that reached the client, as marks in its row."""
    times, _ = audio_arrivals(request)
    looks = {
        "audio arrives": (times[1:], theme.SKY, "triangle-up"),
        "first audio": (times[:1], theme.ORANGE, "star"),
    }
    for name, (at, color, symbol) in looks.items():
        figure.add_scatter(
            name=name,
            legendgroup=name,
            showlegend=legend,
            x=at,
            y=[row] * len(at),
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 12},
            hovertemplate="%{x:.1f} ms",
        )
