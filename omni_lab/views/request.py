"""Figures of one request: its way through the stages, and the listener's buffer while it plays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.figures import thin
from omni_lab.views.gantt import BARS, draw_steps, merged

SHADED = 100
"""Underruns that are shaded at most; all are marked."""


@dataclass(frozen=True)
class Playback:
    """A player that starts at the first chunk and plays whenever it has audio; times in ms since send.

    `times_ms`, `level_s`: corners of the buffer level's line. `underruns_ms` [n, 2]: spans in which it waits, empty,
    for the next chunk; together they last as long as the answer's `audio_underrun_s`.
    """

    times_ms: np.ndarray
    level_s: np.ndarray
    underruns_ms: np.ndarray


def timeline(request: pd.Series, steps: pd.DataFrame, chunks: pd.DataFrame) -> go.Figure:
    """One request's way through the stages, in ms since it was sent.

    A row for the client, for each stage (replica) the steps that overlapped the request, solid while the stage had
    it, pale before and after, and for each edge its hand-offs from production to receipt. Where a row has more than
    `gantt.BARS` steps of a kind, neighbours are drawn as one bar whose hover text counts them; of more hand-offs as
    many are shown, and the legend says so.
    """
    send, end = request.get("send_ns"), request.get("e2el_ms")
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": "Through the stages"}, "barmode": "overlay"})
    if send is None or end is None or pd.isna(send) or pd.isna(end):
        return theme.empty(figure)
    handoffs = of_request(chunks, request)
    handoffs = handoffs.assign(**{c: (handoffs[f"{c}_ns"] - send) / 1e6 for c in ("produced", "sent", "received")})
    during = steps[(steps["end_ns"] >= send) & (steps["start_ns"] <= send + end * 1e6)]
    during = during.assign(start=(during["start_ns"] - send) / 1e6, end=(during["end_ns"] - send) / 1e6, row="")
    edges = list(handoffs.sort_values("received")["edge"].unique())
    rows, parts = ["client", *(edge for edge in edges if edge.startswith("client->"))], []
    for stage, taken in during.groupby("stage", observed=True):
        several = taken["replica"].nunique() > 1
        for replica, part in taken.groupby("replica"):
            rows.append(f"{stage} {replica}" if several else str(stage))
            since, until = stage_span(str(stage), handoffs, end)
            inside = (part["end"] > since) & (part["start"] <= until)
            lane = part.assign(row=rows[-1], opacity=np.where(inside, 1.0, 0.3))
            parts += [merged(kind) for _, kind in lane.groupby("kind")]
        rows += [edge for edge in edges if edge.startswith(f"{stage}->")]
    rows += [edge for edge in edges if edge not in rows]
    _client(figure, request)
    if parts:
        draw_steps(figure, pd.concat(parts))
    _handoffs(figure, handoffs)
    figure.update_layout(height=150 + 44 * len(rows), bargap=0.3, legend_y=-60 / (44 * len(rows)))
    figure.update_xaxes(title="ms since the request was sent", range=[-0.02 * end, 1.02 * end])
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=rows[::-1],
        range=[-0.6, len(rows) - 0.4],
        tickvals=rows,
        ticktext=[row.replace("->", " → ") for row in rows],
    )
    return figure


def playback_buffer(request: pd.Series) -> go.Figure:
    """Seconds of audio that wait in the listener's player, over ms since send; underruns are shaded.

    The player starts at the first chunk. A chunk lasts its share of the answer's samples.
    """
    title = {"text": "Playback buffer, s of audio"}
    legend = {"y": -0.3}
    figure = go.Figure(layout={"template": theme.LIGHT, "title": title, "height": 300, "legend": legend})
    arrivals, samples = audio_arrivals(request)
    if not len(arrivals):
        return theme.empty(figure)
    durations = samples / samples.sum() * request["audio_duration_s"]
    played = playback(arrivals, durations)
    figure.add_scatter(
        name="buffer",
        x=played.times_ms,
        y=played.level_s,
        mode="lines",
        fill="tozeroy",
        line={"color": theme.BLUE},
        hovertemplate="%{x:.0f} ms: %{y:.2f} s waiting",
    )
    figure.add_scatter(
        name="chunk arrives",
        x=arrivals,
        y=np.zeros(len(arrivals)),
        mode="markers",
        marker={"color": theme.ORANGE, "symbol": "triangle-up", "size": 9},
        customdata=durations,
        hovertemplate="%{x:.1f} ms: %{customdata:.2f} s of audio",
        cliponaxis=False,
    )
    _underruns(figure, played.underruns_ms)
    figure.update_xaxes(title="ms since the request was sent", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def of_request(chunks: pd.DataFrame, request: pd.Series) -> pd.DataFrame:
    """The rows of `chunks` that belong to `request`."""
    mine = chunks["request"] == request["id"]
    for key in ("configuration", "concurrency", "repeat"):
        if key in chunks and key in request and pd.notna(request[key]):
            mine &= chunks[key] == request[key]
    return chunks[mine].sort_values("received_ns")


def audio_arrivals(request: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """When each chunk of audio reached the client, in ms since send, and its samples; chunks without any left out."""
    times, samples = request.get("audio_times_ms"), request.get("audio_chunk_samples")
    if not isinstance(times, list) or not isinstance(samples, list):
        return np.zeros(0), np.zeros(0)
    times, samples = np.array(times, dtype=float), np.array(samples, dtype=float)
    return times[samples > 0], samples[samples > 0]


def playback(arrivals_ms: np.ndarray, durations_s: np.ndarray) -> Playback:
    """Plays chunks that arrive at `arrivals_ms` and last `durations_s` each, and records the buffer level."""
    times, levels, underruns = [], [], []
    now, level = (arrivals_ms[0] if len(arrivals_ms) else 0.0), 0.0
    for arrival, duration in zip(arrivals_ms, durations_s, strict=True):
        empty = now + 1000 * level
        if empty < arrival:
            times.append(empty)
            levels.append(0.0)
            underruns.append((empty, arrival))
            level = 0.0
        else:
            level -= (arrival - now) / 1000
        times += [arrival, arrival]
        levels += [level, level + duration]
        now, level = arrival, level + duration
    if times:
        times.append(now + 1000 * level)
        levels.append(0.0)
    return Playback(np.array(times), np.array(levels), np.array(underruns).reshape(-1, 2))


def _client(figure: go.Figure, request: pd.Series) -> None:
    """The request's whole life as a thin bar, with its first token and first audio marked."""
    figure.add_bar(
        name="request",
        base=[0],
        x=[request["e2el_ms"]],
        y=["client"],
        orientation="h",
        width=0.25,
        marker={"color": theme.GREY},
        hovertemplate="sent at 0, done at %{x:.1f} ms",
        showlegend=False,
    )
    marks = {
        "audio arrives": (audio_arrivals(request)[0], theme.SKY, "triangle-up"),
        "first token": ([request.get("ttft_ms")], theme.PURPLE, "diamond"),
        "first audio": ([request.get("audio_ttfp_ms")], theme.ORANGE, "star"),
    }
    for name, (times, color, symbol) in marks.items():
        if len(times) and pd.notna(times[0]):
            figure.add_scatter(
                name=name,
                x=times,
                y=["client"] * len(times),
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 11, "line": {"width": 1, "color": "#ffffff"}},
                hovertemplate="%{x:.1f} ms",
            )


def stage_span(stage: str, chunks: pd.DataFrame, end: float) -> tuple[float, float]:
    """From when to when the stage had the request: its first input's receipt to its last output's production."""
    source, target = chunks["edge"].str.split("->", n=1).str[0], chunks["edge"].str.split("->", n=1).str[-1]
    inputs, outputs = chunks.loc[target == stage, "received"], chunks.loc[source == stage, "produced"]
    return (inputs.min() if len(inputs) else 0.0), (outputs.max() if len(outputs) else end)


def _underruns(figure: go.Figure, spans_ms: np.ndarray) -> None:
    """A mark for each underrun, and the longest ones shaded."""
    silent = spans_ms[:, 1] - spans_ms[:, 0]
    for start, stop in spans_ms[np.argsort(-silent, kind="stable")[:SHADED]]:
        figure.add_vrect(x0=start, x1=stop, fillcolor=theme.VERMILION, opacity=0.35, line_width=0)
    if len(silent):
        figure.add_scatter(
            name="underrun" if len(silent) <= SHADED else f"underrun: {len(silent):,}, the longest {SHADED} shaded",
            x=spans_ms.mean(axis=1),
            y=np.zeros(len(silent)),
            mode="markers",
            marker={"color": theme.VERMILION, "symbol": "x", "size": 9},
            customdata=silent,
            hovertemplate="silent for %{customdata:.0f} ms",
        )


def _handoffs(figure: go.Figure, chunks: pd.DataFrame) -> None:
    """Each hand-off from production to receipt; of many on one edge BARS, evenly over the time."""
    shown = pd.concat([thin(own, BARS) for _, own in chunks.groupby("edge")]) if len(chunks) else chunks
    shown = shown.sort_values("received")
    took = shown["received"] - shown["produced"]
    figure.add_bar(
        name="hand-off",
        base=shown["produced"],
        x=took,
        y=shown["edge"],
        orientation="h",
        width=0.3,
        marker={"color": theme.VERMILION, "opacity": 0.5, "line": {"width": 0}},
        hoverinfo="skip",
        showlegend=False,
    )
    name = "hand-off received"
    figure.add_scatter(
        name=name if len(shown) == len(chunks) else f"{name} ({len(shown):,} of {len(chunks):,} shown)",
        x=shown["received"],
        y=shown["edge"],
        mode="markers",
        marker={"color": theme.VERMILION, "symbol": "triangle-right", "size": 8},
        customdata=np.column_stack([shown["index"], shown["frames"], shown["bytes"], took]),
        hovertemplate="chunk %{customdata[0]} at %{x:.2f} ms<br>%{customdata[1]} frames, %{customdata[2]} bytes, "
        "%{customdata[3]:.2f} ms after it was produced",
    )
