"""The report: one HTML file that shows a run and opens offline."""

from __future__ import annotations

import base64
import io
import json
import math
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
from omni_lab.views import figures, request, theme
from omni_lab.views.figures import load_label
from omni_lab.views.trust import warnings

PLAYERS = 16
"""Recordings that the report embeds at most."""

AUDIO_BYTES = 4_000_000
"""Bytes of recordings that the report embeds at most (a third more as base64)."""

REQUESTS = 12
"""Requests whose way through the stages the report embeds at most."""

PEAKS = 200
"""Points of one waveform picture."""

COUNT, NUMBER, SHARE = "count", "number", "share"
"""How a figure is written: as a whole number, with three significant digits, in percent."""

SUMMARY = (
    ("completed", "Completed", COUNT),
    ("failed", "Failed", COUNT),
    ("request_throughput_per_s", "Requests / s", NUMBER),
    ("audio_throughput_s_per_s", "Audio s / s", NUMBER),
    ("output_throughput_tokens_per_s", "Tokens / s", NUMBER),
    ("mean_ttft_ms", "TTFT mean, ms", NUMBER),
    ("mean_audio_ttfp_ms", "TTFP mean, ms", NUMBER),
    ("p99_audio_ttfp_ms", "TTFP p99, ms", NUMBER),
    ("mean_audio_rtf", "RTF mean", NUMBER),
    ("p99_audio_rtf", "RTF p99", NUMBER),
    ("mean_e2el_ms", "E2EL mean, ms", NUMBER),
    ("p99_e2el_ms", "E2EL p99, ms", NUMBER),
    ("mean_tpot_ms", "TPOT mean, ms", NUMBER),
    ("audio_continuity_ok_rate", "Plays without gap", SHARE),
    ("mean_audio_underrun_s", "Underrun mean, s", NUMBER),
    ("hit_max_frames", "Cut at max frames", COUNT),
    ("mean_requests_in_flight", "In flight", NUMBER),
    ("client_busy_share", "Client busy", SHARE),
)
"""Columns of the summary table: name in `cells`, heading, how it is written."""

FIRST_WAVE = (
    ("first_wave_requests", "Requests", COUNT),
    ("first_wave_mean_ttft_ms", "TTFT mean, ms", NUMBER),
    ("first_wave_mean_audio_ttfp_ms", "TTFP mean, ms", NUMBER),
    ("first_wave_mean_audio_rtf", "RTF mean", NUMBER),
    ("first_wave_mean_e2el_ms", "E2EL mean, ms", NUMBER),
    ("steady_request_throughput_per_s", "Requests / s after it", NUMBER),
)
"""Columns of the table of the first wave."""

STAGES = (
    ("steps", "Steps", COUNT),
    ("mean_batch", "Mean batch", NUMBER),
    ("step_ms", "Step mean, ms", NUMBER),
    ("gap_us_median", "Gap median, µs", NUMBER),
    ("gap_us_p99", "Gap p99, µs", NUMBER),
    ("busy_ratio", "Busy", SHARE),
    ("tokens_per_s", "Tokens or frames / s", NUMBER),
)
"""Columns of the stage table: name in `stages`, heading, how it is written."""

RATIOS = (
    ("request_throughput_per_s", "Request throughput", True),
    ("audio_throughput_s_per_s", "Audio throughput", True),
    ("mean_ttft_ms", "TTFT", False),
    ("mean_audio_ttfp_ms", "TTFP", False),
    ("mean_e2el_ms", "E2EL", False),
    ("mean_audio_rtf", "RTF", False),
)
"""Figures compared between configurations: name in `cells`, heading, whether more is better."""

CELL = ("configuration", "concurrency")
"""What identifies a cell."""

MISSING = "not measured"


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
        summary=_table(run.cells, CELL, SUMMARY),
        first_wave=_table(_waves(run.cells), CELL, FIRST_WAVE),
        ratios=_ratios(run.cells),
        stages=_table(run.stages, (*CELL, "stage"), STAGES),
        sections=[(title, [_json(figure) for figure in group]) for title, group in _sections(run)],
        walks=[(label, [_json(figure) for figure in pair]) for label, pair in _walks(run)],
        players=players,
        saved=int(run.requests["audio_file"].notna().sum()) if "audio_file" in run.requests else 0,
        definitions=run.record.get("definitions") or {},
        experiments={name: _yaml(content) for name, content in _experiments(run.record).items()},
        environment=_yaml(run.record.get("environment")),
        plotly=Markup(get_plotlyjs()),
        templates=_script({"light": theme.template().to_plotly_json(), "dark": theme.template(True).to_plotly_json()}),
        missing=MISSING,
    )
    path = run.path / "report.html"
    path.write_text(page, "utf-8")
    return path


def _sections(run: Run) -> Iterator[tuple[str, list[go.Figure]]]:
    yield (
        "Latency",
        [figures.distribution(run.requests, name) for name in ("ttft_ms", "audio_ttfp_ms", "e2el_ms", "audio_rtf")],
    )
    yield (
        "Throughput and real-time factor",
        [
            figures.by_concurrency(run.cells, name)
            for name in ("audio_throughput_s_per_s", "request_throughput_per_s", "mean_audio_rtf", "mean_audio_ttfp_ms")
        ],
    )
    yield "First packet against real-time factor", [figures.ttfp_rtf(run.requests)]
    yield (
        "Stages",
        [figures.stage_bars(run.stages, name) for name in ("busy_ratio", "mean_batch", "step_ms", "gap_us_median")],
    )


def _walks(run: Run) -> Iterator[tuple[str, tuple[go.Figure, go.Figure]]]:
    """The median and the slowest request of each cell, with timeline and playback buffer."""
    if not {"send_ns", "e2el_ms"} <= set(run.requests.columns):
        return
    done = run.requests[run.requests["send_ns"].notna() & run.requests["e2el_ms"].notna()]
    chosen = []
    for (name, concurrency), cell in done.groupby(["configuration", "concurrency"], sort=False, dropna=False):
        ordered = cell.sort_values("e2el_ms")
        chosen.append(
            (f"{name}, concurrency {load_label(concurrency)}: median request", ordered.iloc[(len(cell) - 1) // 2])
        )
        if len(cell) > 2:
            chosen.append((f"{name}, concurrency {load_label(concurrency)}: slowest request", ordered.iloc[-1]))
    for label, row in figures.thin(pd.Series(chosen, dtype=object), REQUESTS):
        walk = request.timeline(row, run.steps, run.chunks), request.playback_buffer(row)
        yield f"{label} ({row['id']})", walk


def _players(run: Run) -> Iterator[dict[str, Any]]:
    """Recordings to embed: one of each cell in turn, until PLAYERS or AUDIO_BYTES are reached."""
    if "audio_file" not in run.requests:
        return
    saved = run.requests[run.requests["audio_file"].notna()]
    turn = saved.groupby(["configuration", "concurrency"], sort=False, dropna=False).cumcount()
    room = AUDIO_BYTES
    for _, row in saved.loc[turn.sort_values(kind="stable").index[:PLAYERS]].iterrows():
        file = run.path / row["audio_file"]
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file, but requests.jsonl names it for request {row['id']}")
        room -= file.stat().st_size
        if room < 0:
            return
        audio = file.read_bytes()
        yield {
            "label": f"{row['configuration']}, concurrency {load_label(row['concurrency'])}",
            "id": row["id"],
            "text": row.get("text") or "",
            "asked": row.get("target_text") or "",
            "audio": base64.b64encode(audio).decode("ascii"),
            "wave": waveform(audio),
            "facts": [
                ("TTFP", _text(row.get("audio_ttfp_ms"), NUMBER, unit=" ms")),
                ("RTF", _text(row.get("audio_rtf"), NUMBER)),
                ("Audio", _text(row.get("audio_duration_s"), NUMBER, unit=" s")),
                ("Underrun", _text(row.get("audio_underrun_s"), NUMBER, unit=" s")),
            ],
        }


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


def _table(frame: pd.DataFrame, keys: tuple[str, ...], columns: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    """Heading and cells of a table; `keys` name the columns that say what a row is about."""
    rows = [[*(_key(row, key) for key in keys), *(_figure(row, *column) for column in columns)] for row in _rows(frame)]
    return {"head": [*(key.capitalize() for key in keys), *(heading for _, heading, _ in columns)], "rows": rows}


def _ratios(cells: pd.DataFrame) -> dict[str, Any] | None:
    """Each configuration divided by the first one at the same concurrency; None if there is only one."""
    if cells["configuration"].nunique() < 2:
        return None
    first = cells["configuration"].iloc[0]
    bases = {load_label(cell["concurrency"]): cell for cell in _rows(cells) if cell["configuration"] == first}
    rows = []
    for cell in _rows(cells):
        base = bases.get(load_label(cell["concurrency"]))
        if base is not None and cell["configuration"] != first:
            ratios = [_ratio(cell, base, name, more) for name, _, more in RATIOS]
            rows.append([*(_key(cell, key) for key in CELL), *ratios])
    head = [f"{heading} ({'more' if more else 'less'} is better)" for _, heading, more in RATIOS]
    return {"base": first, "head": ["Configuration", "Concurrency", *head], "rows": rows}


def _ratio(cell: pd.Series, base: pd.Series, name: str, more: bool) -> dict[str, str]:
    value, reference = cell.get(name), base.get(name)
    if value is None or reference is None or pd.isna(value) or pd.isna(reference) or not reference:
        return {"text": MISSING, "kind": "missing"}
    text = f"{value / reference:.2f}x"
    error = math.hypot(*(row.get(f"{name}_std", math.nan) / math.sqrt(row.get("repeats", 1)) for row in (cell, base)))
    if abs(value - reference) <= 2 * error:
        return {"text": f"{text} (within noise)", "kind": "same"}
    return {"text": text, "kind": "better" if (value > reference) == more else "worse"}


def _waves(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells in which several requests started at once."""
    return cells[cells["first_wave_requests"] > 1] if "first_wave_requests" in cells else cells.iloc[:0]


def _rows(frame: pd.DataFrame) -> list[pd.Series]:
    return [row for _, row in frame.iterrows()]


def _key(row: pd.Series, key: str) -> str:
    return load_label(row[key]) if key == "concurrency" else str(row[key])


def _figure(row: pd.Series, name: str, _: str, form: str) -> dict[str, str]:
    text = _text(row.get(name), form, row.get(f"{name}_std"))
    return {"text": text, "kind": "missing" if text == MISSING else "figure"}


def _text(value: float | None, form: str, spread: float | None = None, unit: str = "") -> str:
    """A figure as text, its spread with as many digits."""
    if value is None or pd.isna(value):
        return MISSING
    if form == SHARE:
        value, spread, unit = 100 * value, None if spread is None else 100 * spread, " %"
    digits = 0 if form == SHARE or not value else min(4, max(0, 2 - math.floor(math.log10(abs(value)))))
    if form == COUNT:
        digits = 0 if float(value).is_integer() else 1
    around = "" if spread is None or pd.isna(spread) or not spread else f" ± {spread:.{digits}f}"
    return f"{value:.{digits}f}{around}{unit}"


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
