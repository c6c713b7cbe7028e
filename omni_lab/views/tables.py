"""The report's tables: headings and cells with their texts and kinds, ready for the template."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from omni_lab.frames import Run
from omni_lab.metrics.phases import HOST
from omni_lab.metrics.relative import FEW, HIGHER, NOISE
from omni_lab.views import checks
from omni_lab.views import ladder as rungs
from omni_lab.views.figures import load_label

Table = dict[str, Any]
"""`head`, a list of headings, and `rows`: a cell is a text that heads its row, or {"text", "kind"}."""

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
    ("first_wave_completed", "Requests", COUNT),
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

LADDER = (
    ("request_throughput_per_s", "Requests / s", True),
    ("mean_audio_ttfp_ms", "TTFP mean, ms", False),
    ("mean_audio_rtf", "RTF mean", False),
)
"""The same for the ladder, whose published figures these are."""

GAPS = (
    ("gap_us_median", "Gap median, µs", NUMBER),
    ("gap_us_p99", "Gap p99, µs", NUMBER),
    ("gap_schedule_us", "Schedule mean, µs", NUMBER),
    ("gap_payload_us", "Build payloads mean, µs", NUMBER),
    ("gap_send_us", "Send mean, µs", NUMBER),
    ("gap_other_us", "Other mean, µs", NUMBER),
    ("gap_us", "Gap mean (sum of these), µs", NUMBER),
    ("of_step", "Gap / step, %", NUMBER),
    ("gap_input_us", "Wait for input mean, µs", NUMBER),
    ("gap_slot_us", "Wait for a slot mean, µs", NUMBER),
    ("causes_us", "Gap with waiting (sum), µs", NUMBER),
    ("between_us", "Between steps, by their times, µs", NUMBER),
)
"""Columns of the step-gap ladder; the last one is the sum found in another way."""

TOTALS = (
    ("lost_steps", "Steps lost", COUNT),
    ("failed", "Failed", COUNT),
    ("thinker_tokens", "Text tokens: thinker", COUNT),
    ("client_tokens", "Text tokens: client", COUNT),
    ("talker_frames", "Frames: talker", COUNT),
    ("code2wav_frames", "Frames: code2wav", COUNT),
    ("client_frames", "Frames: client", COUNT),
    ("frame_samples", "Samples: in these frames", COUNT),
    ("client_samples", "Samples: client", COUNT),
)
"""Columns of the table that counts what stages gave and clients got."""

CAPTURES = (
    ("steps", "Steps recorded", COUNT),
    ("alignment_us", "Clock error at most, µs", NUMBER),
    ("window_step_ms", "Step mean while recorded, ms", NUMBER),
    ("rest_step_ms", "Step mean in the rest of this repeat, ms", NUMBER),
    ("step_ms", "Step mean in this repeat, ms", NUMBER),
    ("other_step_ms", "Step mean in the others, ms", NUMBER),
    ("gap_us_median", "Gap median in this repeat, µs", NUMBER),
    ("other_gap_us_median", "Gap median in the others, µs", NUMBER),
    ("gap_us_max", "Longest gap in this repeat, µs", NUMBER),
    ("other_gap_us_max", "Longest gap in the others, µs", NUMBER),
    ("request_throughput_per_s", "Requests / s in this repeat", NUMBER),
    ("other_request_throughput_per_s", "Requests / s in the others", NUMBER),
)
"""Columns of the table that sets captured repeats beside the others."""

CELL = ("configuration", "concurrency")
"""What identifies a cell."""

MISSING = "not measured"


def summary(cells: pd.DataFrame) -> Table:
    """A row for each cell."""
    return _table(cells, CELL, SUMMARY)


def first_wave(cells: pd.DataFrame) -> Table:
    """A row for each cell in which several requests started at once."""
    waves = cells[cells["first_wave_completed"] > 1] if "first_wave_completed" in cells else cells.iloc[:0]
    return _table(waves, CELL, FIRST_WAVE)


def stages(frame: pd.DataFrame) -> Table:
    """A row for each stage of each cell."""
    return _table(frame, (*CELL, "stage"), STAGES)


def ratios(run: Run) -> Table | None:
    """Each configuration divided by the first one at the same concurrency; None if there is only one."""
    if run.cells["configuration"].nunique() < 2:
        return None
    first, found = run.cells["configuration"].iloc[0], _found(run)
    others = [cell for cell in _rows(run.cells) if cell["configuration"] != first]
    rows = [[*_keys(cell), *(_ratio(found, cell, name, more) for name, _, more in RATIOS)] for cell in others]
    head = [f"{heading} ({'more' if more else 'less'} is better)" for _, heading, more in RATIOS]
    return {"base": first, "head": ["Configuration", "Concurrency", *head], "rows": rows}


def ladder(run: Run) -> Table:
    """A row for each rung and concurrency: the figure and its ratio to the first rung, here and as published."""
    first, found = run.cells["configuration"].iloc[0], _found(run)
    theirs = {(row["configuration"], load_label(row["concurrency"])): row for row in _rows(rungs.published())}
    talker = run.stages[run.stages["stage"] == "talker"]
    gaps = {(row["configuration"], load_label(row["concurrency"])): row for row in _rows(talker)}
    rows = []
    for cell in _rows(run.cells):
        rung, load = _keys(cell)
        row: list[Any] = [rung, load]
        for name, _, more in LADDER:
            stated, base = theirs.get((rung, load), {}).get(name), theirs.get((first, load), {}).get(name)
            own = _ratio(found, cell, name, more) if rung != first else {"text": "1x", "kind": "same"}
            row += [_figure(cell, name, "", NUMBER), own, _cell(text(stated, NUMBER))]
            row.append(_cell(f"{stated / base:.3g}x" if stated and base else MISSING))
        rows.append([*row, _figure(gaps.get((rung, load), pd.Series(dtype=float)), "gap_us_median", "", NUMBER)])
    head = []
    for _, heading, _ in LADDER:
        what, _, _ = heading.partition(",")
        head += [heading, f"{what} against {first}", f"{heading}, published", f"{what} against {first}, published"]
    return {"head": ["Rung", "Concurrency", *head, "Talker step gap, median, µs"], "rows": rows}


def gaps(run: Run) -> Table | None:
    """The step-gap ladder: a row for each stage, configuration and concurrency; None if no gap was measured.

    `Equal` says whether the causes add up to the time between two steps.
    """
    if "gap_schedule_us" not in run.stages or run.stages["gap_schedule_us"].isna().all():
        return None
    gap_us = sum(run.stages[f"gap_{cause}_us"] for cause in HOST)
    found = checks.sums(run)[["causes_us", "between_us", "agree"]]
    frame = run.stages.assign(gap_us=gap_us, of_step=gap_us / 10 / run.stages["step_ms"], **found)
    frame = frame.sort_values("stage", kind="stable")
    words = {True: {"text": "yes", "kind": "same"}, False: {"text": "no", "kind": "worse"}, None: _cell(MISSING)}
    return _with_verdict(_table(frame, ("stage", *CELL), GAPS), 3, [words[agree] for agree in frame["agree"]])


def totals(run: Run) -> Table:
    """What stages gave and clients got, a row for each cell; `Equal` says what differs."""
    frame = checks.totals(run)
    return _with_verdict(_table(frame, CELL, TOTALS), len(CELL), [_verdict(total) for total in _rows(frame)])


def captures(run: Run) -> Table:
    """A row for each worker that was captured, beside the repeats in which none was."""
    frame = checks.captures(run)
    table = _table(frame, (*CELL, "stage", "replica"), CAPTURES)
    ends = [row["error"] or row["stopped_by"] for row in _rows(frame)]
    return {
        "head": [*table["head"], "Ended by"],
        "rows": [[*r, _cell(e)] for r, e in zip(table["rows"], ends, strict=True)],
    }


def _verdict(total: pd.Series) -> dict[str, str]:
    """What a row of `checks.totals` says in one cell."""
    if total["failed"] > 0:
        return {"text": "not comparable: the steps of failed requests count too", "kind": "same"}
    if total["lost_steps"] > 0:
        return {"text": "not comparable: steps were lost", "kind": "same"}
    compared = total[[columns[0] for _, columns, _ in checks.TOTALS]]
    if compared.isna().all():
        return _cell(MISSING)
    found = checks.differences(total)
    return {"text": "; ".join(found), "kind": "worse"} if found else {"text": "yes", "kind": "same"}


def text(value: float | None, form: str, spread: float | None = None, unit: str = "") -> str:
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


def _table(frame: pd.DataFrame, keys: tuple[str, ...], columns: tuple[tuple[str, str, str], ...]) -> Table:
    """Heading and cells of a table; `keys` name the columns that say what a row is about."""
    rows = [[*_keys(row, keys), *(_figure(row, *column) for column in columns)] for row in _rows(frame)]
    return {"head": [*(key.capitalize() for key in keys), *(heading for _, heading, _ in columns)], "rows": rows}


def _with_verdict(table: Table, place: int, verdicts: list[dict[str, str]]) -> Table:
    """The table with `Equal` behind what a row is about, where it is seen without scrolling."""
    head = [*table["head"][:place], "Equal", *table["head"][place:]]
    rows = zip(table["rows"], verdicts, strict=True)
    return {"head": head, "rows": [[*row[:place], verdict, *row[place:]] for row, verdict in rows]}


def _found(run: Run) -> dict[tuple[str, str, str], pd.Series]:
    """The cells' ratios by configuration, load and figure."""
    whole = run.ratios[run.ratios["stage"].isna()]
    return {(*_keys(row), row["figure"]): row for row in _rows(whole)}


def _ratio(found: dict[tuple[str, str, str], pd.Series], cell: pd.Series, name: str, more: bool) -> dict[str, str]:
    ratio = found.get((*_keys(cell), name))
    if ratio is None:
        return _cell(MISSING)
    words = f"{ratio['ratio']:.3g}x"
    if ratio["verdict"] == FEW:
        return {"text": f"{words} ({FEW})", "kind": "same"}
    words += f" ({ratio['low']:.3g} to {ratio['high']:.3g})"
    if ratio["verdict"] == NOISE:
        return {"text": f"none: {words}", "kind": "same"}
    return {"text": words, "kind": "better" if (ratio["verdict"] == HIGHER) == more else "worse"}


def _rows(frame: pd.DataFrame) -> list[pd.Series]:
    return [row for _, row in frame.iterrows()]


def _keys(row: pd.Series, keys: tuple[str, ...] = CELL) -> list[str]:
    return [load_label(row[key]) if key == "concurrency" else str(row[key]) for key in keys]


def _figure(row: pd.Series, name: str, _: str, form: str) -> dict[str, str]:
    return _cell(text(row.get(name), form, row.get(f"{name}_std")))


def _cell(words: str) -> dict[str, str]:
    return {"text": words, "kind": "missing" if words == MISSING else "figure"}
