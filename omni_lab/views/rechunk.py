"""What if the same frames had been handed over in other chunks: first audio and playback, from recorded times.

A calculation, not a measurement. Frames keep the times at which the Talker made them, and a chunk takes what chunks of
its size took in the same cell. What other chunks would change in the load of the stages is not in it: many small chunks
cost more steps of Code2Wav than it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.frames import CELL, Run
from omni_lab.metrics.continuity import underrun_s
from omni_lab.metrics.definitions import FRAME_SAMPLES, SAMPLE_RATE
from omni_lab.views import theme
from omni_lab.views.checks import TAIL_SAMPLES
from omni_lab.views.request import audio_arrivals, of_request, playback
from omni_lab.views.steps import at_load, number, of_repeat

TALKER_EDGE, CLIENT_EDGE = "talker->code2wav", "code2wav->client"
FIRST = (1, 2, 4, 8, 12, 25)
"""Sizes of the first chunk that `plans` tries."""


@dataclass(frozen=True)
class Delay:
    """What a chunk of f frames takes from its last frame to the client, or from the chunk before it if that came later.

    `fixed_ms` + `frame_ms` (f + c), where c frames of left context, at most `left_context`, are decoded again with it.
    """

    fixed_ms: float
    frame_ms: float
    left_context: int = 0

    def of(self, frames: int, before: int) -> float:
        """For a chunk of so many frames behind so many others."""
        return self.fixed_ms + self.frame_ms * (frames + min(before, self.left_context))


@dataclass(frozen=True)
class Recorded:
    """The answers of one cell, when the frames of each were made, and what a chunk takes there."""

    requests: pd.DataFrame
    made_ms: list[np.ndarray]
    took: Delay


def recorded(run: Run, configuration: str, concurrency: float | None) -> Recorded:
    """The answers with audio of a cell, of all its repeats. Raises ValueError if the run kept no chunks of it."""
    requests, steps, chunks = (
        rows[(rows["configuration"] == configuration) & at_load(rows, concurrency)]
        for rows in (run.requests, run.steps, run.chunks)
    )
    requests = requests[requests["audio_ttfp_ms"].notna()]
    made_ms = [frame_times_ms(request, steps, chunks) for _, request in requests.iterrows()]
    return Recorded(requests, made_ms, delay(chunks, _left_context(run, configuration)))


def delay(chunks: pd.DataFrame, left_context: int = 0) -> Delay:
    """The straight line through what the chunks of a cell took, over the frames that were decoded for them.

    `left_context`: frames that Code2Wav decodes again before each chunk. Where the chunks tell of no rising line, as
    when all are of one size, their mean. Raises ValueError if there are none.
    """
    keys = [*CELL, "repeat", "request", "index"]
    given = chunks[(chunks["edge"] == TALKER_EDGE) & (chunks["frames"] > 0)].set_index(keys).sort_index()
    arrived = chunks[chunks["edge"] == CLIENT_EDGE].set_index(keys)["received_ns"].reindex(given.index)
    answers = given.groupby(level=keys[:-1], observed=True, dropna=False)
    before = answers["frames"].cumsum() - given["frames"]
    free = arrived.groupby(level=keys[:-1], observed=True, dropna=False).shift()
    took_ms = (arrived - np.fmax(given["produced_ns"], free)) / 1e6
    decoded = (given["frames"] + before.clip(upper=left_context)).astype(float)[took_ms.notna()]
    took_ms = took_ms.dropna().astype(float)
    if took_ms.empty:
        raise ValueError("expected hand-offs of talker and code2wav in chunks; the run kept none of this cell")
    if decoded.nunique() > 1:
        each, fixed = np.polyfit(decoded, took_ms, 1)
        if each > 0 and fixed > 0:
            return Delay(float(fixed), float(each), left_context)
    return Delay(float(took_ms.mean()), 0.0, left_context)


def frame_times_ms(request: pd.Series, steps: pd.DataFrame, chunks: pd.DataFrame) -> np.ndarray:
    """When the Talker had each frame of a request, in ms since it was sent.

    Of each chunk the time of its last frame was recorded. Those before it are the ends of the Talker's last steps until
    then, one frame a step; evenly spaced where the steps do not tell (several replicas, steps missing).
    """
    given = of_request(chunks[chunks["edge"] == TALKER_EDGE], request).sort_values("index")
    given = given[given["frames"] > 0]
    own = of_repeat(steps[(steps["stage"] == "talker") & (steps["tokens"] > 0)], request)
    ends = np.sort(own["end_ns"].to_numpy()) if own["replica"].nunique() == 1 else np.zeros(0)
    times: list[float] = []
    before = float(request["send_ns"])
    for frames, produced in zip(given["frames"], given["produced_ns"].astype(float), strict=True):
        during = ends[(ends > before) & (ends <= produced)][-int(frames) :].astype(float)
        evenly = before + (produced - before) * np.arange(1, frames + 1) / frames
        times += [*(during if len(during) == frames else evenly)[:-1], produced]
        before = produced
    return (np.array(times) - request["send_ns"]) / 1e6


def sizes(first: int, steady: int = 25, ramp: bool = False) -> tuple[int, ...]:
    """Frames of the first, second, ... chunk, the last one repeated; with `ramp` each is twice the one before it."""
    rising = [first]
    while ramp and 2 * rising[-1] < steady:
        rising.append(2 * rising[-1])
    return (*rising, steady)


def plans(steady: int = 25) -> dict[str, tuple[int, ...]]:
    """Chunk sizes to set beside each other: each of FIRST, with a jump to the steady size and with a ramp."""
    jumps = {f"{first}, then {steady}": sizes(first, steady) for first in FIRST}
    return jumps | {f"{first}, doubling": sizes(first, steady, ramp=True) for first in FIRST if 2 * first < steady}


def arrivals(made_ms: np.ndarray, took: Delay, chunks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """When chunks of these sizes, the last one repeated, reach the client, in ms, and how many frames each has."""
    times: list[float] = []
    counts: list[int] = []
    done = 0
    while done < len(made_ms):
        count = min(chunks[min(len(counts), len(chunks) - 1)], len(made_ms) - done)
        complete = made_ms[done + count - 1]
        times.append(max(complete, times[-1] if times else 0.0) + took.of(count, done))
        counts.append(count)
        done += count
    return np.array(times), np.array(counts, dtype=int)


def rechunked(request: pd.Series, made_ms: np.ndarray, took: Delay, chunks: Sequence[int]) -> pd.Series:
    """The request as it would have been received in other chunks: its columns of arrival and playback anew."""
    at_ms, frames = arrivals(made_ms, took, chunks)
    samples = FRAME_SAMPLES * frames
    samples[:1] -= TAIL_SAMPLES
    changed = {
        "audio_times_ms": at_ms.round(3).tolist(),
        "audio_chunk_frames": frames.tolist(),
        "audio_chunk_samples": samples.tolist(),
        "audio_ttfp_ms": float(at_ms[0]),
        "audio_underrun_s": underrun_s((at_ms / 1e3).tolist(), (samples / SAMPLE_RATE).tolist()),
    }
    return pd.Series(request.to_dict() | changed)


def what_if(known: Recorded, several: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """Every answer in other chunks: a row for each plan and answer, as in `Run.requests`, with its `plan`.

    `several`: name -> frames of the first, second, ... chunk, the last one repeated.
    """
    rows = [
        rechunked(request, made_ms, known.took, chunks).to_dict() | {"plan": plan}
        for (_, request), made_ms in zip(known.requests.iterrows(), known.made_ms, strict=True)
        for plan, chunks in several.items()
    ]
    return pd.DataFrame(rows)


def buffers(recorded: pd.Series, calculated: pd.Series) -> go.Figure:
    """The listener's buffer as recorded and as calculated for other chunks, on one axis; underruns are marked."""
    figure = go.Figure(
        layout={"template": theme.LIGHT, "title": {"text": "Playback buffer, s of audio"}, "height": 380}
    )
    several = (("recorded", recorded, theme.GREY, "dot"), ("calculated", calculated, theme.BLUE, "solid"))
    for place, (name, request, color, dash) in enumerate(several):
        at_ms, samples = audio_arrivals(request)
        if not len(at_ms):
            return theme.empty(figure)
        played = playback(at_ms, samples / SAMPLE_RATE)
        silent_ms = float(np.diff(played.underruns_ms).sum())
        figure.add_scatter(
            name=f"{name}: first audio {number(at_ms[0])} ms, silent for {number(silent_ms)} ms",
            x=played.times_ms,
            y=played.level_s,
            mode="lines",
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate=f"{name}, %{{x:.0f}} ms: %{{y:.2f}} s waiting<extra></extra>",
        )
        figure.add_scatter(
            x=at_ms,
            y=np.full(len(at_ms), 1 - place),
            yaxis="y2",
            mode="markers",
            marker={"color": color, "symbol": "triangle-up", "size": 8},
            customdata=samples / SAMPLE_RATE,
            hovertemplate=f"{name}, %{{x:.0f}} ms: %{{customdata:.2f}} s of audio arrive<extra></extra>",
            showlegend=False,
        )
        look = {"fillcolor": theme.VERMILION if place else theme.GREY, "opacity": 0.35 if place else 0.2}
        for start, stop in played.underruns_ms:
            figure.add_shape(type="rect", x0=start, x1=stop, y0=0, y1=1, yref="y domain", line_width=0, **look)
    figure.update_layout(
        yaxis={"domain": [0.2, 1], "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.12], "range": [-0.6, 1.6], "anchor": "free", "showgrid": False, "zeroline": False,
                "tickvals": [1, 0], "ticktext": ["recorded", "calculated"]},
        xaxis_anchor="free",
        legend_y=-0.2,
    )  # fmt: skip
    last = max(request["audio_times_ms"][-1] for _, request, _, _ in several)
    return figure.update_xaxes(title="ms since the request was sent; triangles: a chunk arrives", range=[0, 1.2 * last])


def tradeoff(rows: pd.DataFrame, measured: pd.DataFrame) -> go.Figure:
    """First audio against silence: each plan of `what_if` a point, mean of its answers; stars are what was measured.

    `measured`: the requests of the cells at the same load. Down and left is better.
    """
    figure = go.Figure(
        layout={"template": theme.LIGHT, "title": {"text": "First audio against silence"}, "height": 420}
    )
    if rows.empty:
        return theme.empty(figure)
    columns = ["audio_ttfp_ms", "audio_underrun_s"]
    points = rows.groupby("plan", sort=False)[columns].mean()
    ramp = points.index.str.endswith("doubling")
    cells = measured.groupby("configuration", observed=True)[columns].mean().dropna()
    shown = (
        ("calculated, one jump", points[~ramp], theme.BLUE, "circle", 10, "top center"),
        ("calculated, doubling", points[ramp], theme.GREEN, "diamond", 10, "bottom center"),
        ("measured", cells, theme.ORANGE, "star", 16, "middle right"),
    )
    for name, own, color, symbol, size, place in shown:
        figure.add_scatter(
            name=name,
            x=own["audio_ttfp_ms"],
            y=own["audio_underrun_s"],
            text=[str(one).replace("_", " ").split(",")[0] for one in own.index],
            mode="markers+text" if name == "measured" else "lines+markers+text",
            line={"color": color, "width": 1, "dash": "dot"},
            textposition=place,
            textfont={"size": 11},
            marker={"color": color, "symbol": symbol, "size": size},
            cliponaxis=False,
            customdata=[str(one).replace("_", " ") for one in own.index],
            hovertemplate="%{customdata}: first audio %{x:.0f} ms, underrun %{y:.3f} s",
        )
    figure.update_xaxes(title="first audio, ms (mean); numbers: frames of the first chunk", rangemode="tozero")
    return figure.update_yaxes(title="underrun, s (mean)", rangemode="tozero")


def _left_context(run: Run, configuration: str) -> int:
    """Frames that Code2Wav decodes again before each chunk: none where it keeps its state."""
    known = run.record.get("configurations") or {}
    experiment = (known.get(configuration) or {}).get("experiment") or run.record.get("experiment") or {}
    stateful = (experiment.get("optimizations") or {}).get("stateful_code2wav")
    return 0 if stateful else int((experiment.get("chunking") or {}).get("left_context", 0))
