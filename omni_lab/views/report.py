"""The report: one HTML file that shows a run and opens offline."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import soundfile
import yaml
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from omni_lab.frames import Run, load
from omni_lab.quality.recordings import kept, recorded_file
from omni_lab.views import checks, figures, gantt, ladder, quality, request, steps, tables, theme, timeline
from omni_lab.views.figures import load_label
from omni_lab.views.tables import NUMBER, text
from omni_lab.views.trust import findings, warnings

PLAYERS = 16
"""Recordings that the report embeds at most."""

AUDIO_BYTES = 4_000_000
"""Bytes of recordings that the report embeds at most (a third more as base64)."""

REQUESTS = 12
"""Requests whose way through the stages the report embeds at most."""

WINDOWS = 12
"""Cells of which the report embeds all stages at work at most."""

PEAKS = 200
"""Points of one waveform picture."""


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run directory and returns its path.

    The file holds all that it shows: plotly.js, figures, recordings. It makes no network request. Large runs are
    thinned, and the report says where. Raises what `load` raises.
    """
    run = load(run_dir)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("omni_lab", "views"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    players = list(_players(run))
    page = environment.get_template("report.html.jinja").render(
        name=run.record.get("experiment", {}).get("name") or run.path.name,
        directory=run.path.name,
        warnings=warnings(run),
        summary=tables.summary(run.cells),
        first_wave=tables.first_wave(run.cells),
        ratios=tables.ratios(run),
        stages=tables.stages(run.stages),
        ladder=_ladder(run),
        sections=[(title, [_json(figure) for figure in group]) for title, group in _sections(run)],
        causes=[_json(figure) for figure in _causes(run)],
        gaps=tables.gaps(run),
        loops=[(label, [_json(figure) for figure in pair]) for label, pair in _loops(run)],
        windows=[(label, [_json(figure)]) for label, figure in _windows(run)],
        walks=[(label, [_json(figure) for figure in pair]) for label, pair in _walks(run)],
        findings=findings(run),
        totals=tables.totals(run),
        captures=tables.captures(run),
        players=players,
        quality=_quality(run),
        saved=len(kept(run)),
        definitions=run.record.get("definitions") or {},
        experiments={name: _yaml(content) for name, content in _experiments(run.record).items()},
        environment=_yaml(run.record.get("environment")),
        plotly=Markup(get_plotlyjs()),
        templates=_script({"light": theme.template().to_plotly_json(), "dark": theme.template(True).to_plotly_json()}),
        missing=tables.MISSING,
    )
    path = run.path / "report.html"
    path.write_text(page, "utf-8")
    return path


def _sections(run: Run) -> Iterator[tuple[str, list[go.Figure]]]:
    requests = checks.counted(run, run.requests)
    yield (
        "Latency",
        [figures.distribution(requests, name) for name in ("ttft_ms", "audio_ttfp_ms", "e2el_ms", "audio_rtf")],
    )
    yield (
        "Throughput and real-time factor",
        [
            figures.by_concurrency(run.cells, name)
            for name in ("audio_throughput_s_per_s", "request_throughput_per_s", "mean_audio_rtf", "mean_audio_ttfp_ms")
        ],
    )
    yield "First packet against real-time factor", [figures.ttfp_rtf(requests)]
    yield (
        "Stages",
        [figures.stage_bars(run.stages, name) for name in ("busy_ratio", "mean_batch", "step_ms", "gap_us_median")],
    )


def _ladder(run: Run) -> dict[str, Any] | None:
    """The ladder's words, table and figures; None if the run does not climb it."""
    if not ladder.is_ladder(run.cells):
        return None
    gaps = run.stages[run.stages["stage"] == "talker"].rename(columns={"gap_us_median": ladder.GAP})
    drawn = [ladder.figure(run.cells, metric) for metric in ladder.METRICS] + [ladder.figure(gaps, ladder.GAP)]
    return {
        "words": [ladder.provenance(), ladder.COMPARABLE],
        "table": tables.ladder(run),
        "figures": [_json(figure) for figure in drawn],
    }


def _quality(run: Run) -> dict[str, Any] | None:
    """What the recordings sound like: words, table and figures; None if the run kept none."""
    found = quality.section(run)
    if found is None:
        return None
    return {"words": found.words, "table": found.table, "figures": [_json(figure) for figure in found.figures]}


def _causes(run: Run) -> Iterator[go.Figure]:
    """What the gaps of each stage are made of, if any were measured."""
    if "gap_schedule_us" in run.stages:
        for _, rows in run.stages.dropna(subset=["gap_schedule_us"]).groupby("stage", observed=True):
            yield steps.causes(rows)


def _loops(run: Run) -> Iterator[tuple[str, tuple[go.Figure, go.Figure]]]:
    """The step loop of each stage at each concurrency: some steps of every configuration, and all its gaps."""
    measured = checks.counted(run, run.steps)
    measured = measured[measured["schedule_ns"] > 0]
    for stage, own in measured.groupby("stage", observed=True):
        for concurrency in steps.loads_of(own):
            rows = steps.of_stage(own, str(stage), concurrency)
            yield f"{stage}, concurrency {load_label(concurrency)}", (timeline.timeline(rows), steps.histogram(rows))


def _windows(run: Run) -> Iterator[tuple[str, go.Figure]]:
    """All stages at work in the middle of each cell's last repeat that counts."""
    cells = [rows for _, rows in figures.by_cell(checks.counted(run, run.steps))]
    for rows in figures.thin(pd.Series(cells, dtype=object), WINDOWS):
        last = rows[rows["repeat"] == rows["repeat"].max()]
        yield _label(run, last.iloc[0]), gantt.window(last)


def _walks(run: Run) -> Iterator[tuple[str, tuple[go.Figure, go.Figure]]]:
    """The median and the slowest request of each cell, with timeline and playback buffer."""
    if not {"send_ns", "e2el_ms"} <= set(run.requests.columns):
        return
    done = checks.counted(run, run.requests).dropna(subset=["send_ns", "e2el_ms"])
    chosen = []
    for _, cell in figures.by_cell(done):
        ordered = cell.sort_values("e2el_ms")
        chosen.append(("median", ordered.iloc[(len(cell) - 1) // 2]))
        if len(cell) > 2:
            chosen.append(("slowest", ordered.iloc[-1]))
    for which, row in figures.thin(pd.Series(chosen, dtype=object), REQUESTS):
        walk = request.timeline(row, run.steps, run.chunks), request.playback_buffer(row)
        yield f"{_label(run, row)}: {which} request ({row['id']})", walk


def _players(run: Run) -> Iterator[dict[str, Any]]:
    """Recordings to embed: one of each cell in turn, until PLAYERS or AUDIO_BYTES are reached."""
    saved = kept(run)
    turn = saved.groupby(["configuration", "concurrency"], sort=False, dropna=False, observed=True).cumcount()
    room = AUDIO_BYTES
    for _, row in saved.loc[turn.sort_values(kind="stable").index[:PLAYERS]].iterrows():
        file = recorded_file(run, row)
        room -= file.stat().st_size
        if room < 0:
            return
        audio = file.read_bytes()
        yield {
            "label": _label(run, row),
            "id": row["id"],
            "text": row.get("text") or "",
            "asked": row.get("target_text") or "",
            "audio": base64.b64encode(audio).decode("ascii"),
            "wave": waveform(audio),
            "facts": [
                ("TTFP", text(row.get("audio_ttfp_ms"), NUMBER, unit=" ms")),
                ("RTF", text(row.get("audio_rtf"), NUMBER)),
                ("Audio", text(row.get("audio_duration_s"), NUMBER, unit=" s")),
                ("Underrun", text(row.get("audio_underrun_s"), NUMBER, unit=" s")),
            ],
        }


def _label(run: Run, row: pd.Series) -> str:
    """Which cell a request or step is of, and whether its repeat was captured."""
    captured = any(one["repeat"] == row["repeat"] and "traces" in one for one in checks.runs_of(run, row))
    label = f"{row['configuration']}, concurrency {load_label(row['concurrency'])}"
    return f"{label}, captured with the profiler" if captured else label


def waveform(audio: bytes) -> str:
    """The outline of a recording as the path of an SVG of PEAKS x 2 units, full scale from 0 to 2."""
    samples, _ = soundfile.read(io.BytesIO(audio), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if not len(mono):
        return ""
    parts = np.array_split(mono, min(PEAKS, len(mono)))
    step = PEAKS / len(parts)
    top = [f"{i * step:.1f},{1 - part.max():.3f}" for i, part in enumerate(parts)]
    bottom = [f"{i * step:.1f},{1 - part.min():.3f}" for i, part in enumerate(parts)]
    return "M" + "L".join(top + bottom[::-1]) + "Z"


def _experiments(record: dict[str, Any]) -> dict[str, Any]:
    """What was in effect, by configuration; the experiment alone if the run does not tell them apart."""
    experiment = record.get("experiment") or {}
    return record.get("configurations") or {experiment.get("name", "experiment"): experiment}


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content or {}, sort_keys=False, allow_unicode=True, width=100)


def _json(figure: go.Figure) -> Markup:
    """A figure without its template: the page lays on the light or the dark one."""
    content = json.loads(figure.to_json())
    content["layout"].pop("template", None)
    return _script(content)


def _script(content: Any) -> Markup:
    """JSON that may stand inside a script element whatever texts it holds."""
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))
