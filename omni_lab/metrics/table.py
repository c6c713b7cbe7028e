"""Cells as a table of text for the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from omni_lab.metrics.relative import FEW, NOISE

Cell = dict[str, Any]

COLUMNS = (
    ("req/s", "request_throughput", ".3g"),
    ("TTFT ms", "mean_ttft_ms", ".0f"),
    ("TTFP ms", "mean_audio_ttfp_ms", ".0f"),
    ("RTF", "mean_audio_rtf", ".3g"),
    ("E2EL ms", "mean_e2el_ms", ".0f"),
    ("talker frames/s", "stages.talker.tokens_per_s", ".4g"),
    ("talker gap us", "stages.talker.gap_us_median", ".0f"),
    ("thinker tok/s", "stages.thinker.tokens_per_s", ".4g"),
    ("underrun s", "mean_audio_underrun_s", ".3f"),
)
"""Heading, name in the cell, format."""


def cell_table(cells: Sequence[Cell]) -> str:
    """One line for each cell; the deviation over repeats behind a figure, where there is one. Not measured is "-"."""
    return _table(cells, _with_spread)


def ratio_table(cells: Sequence[Cell]) -> str:
    """Every figure divided by that of the first configuration at the same concurrency, and its 95 % interval."""
    others = [cell for cell in cells if cell["configuration"] != cells[0]["configuration"]]
    ratios = [found for cell in others for found in (cell["relative"] or {}).values() if found]
    legend = "(low-high): 95 % interval over the repeats; none: 1 lies in it, the difference is within noise"
    if any(found["verdict"] == FEW for found in ratios):
        legend = f"{legend}\n?: {FEW} for an interval, so whether there is a difference is not known"
    return f"{_table(others, _ratio)}\n{legend}"


def start_lines(configurations: dict[str, Any]) -> Iterator[str]:
    """How long each configuration took until it could answer; the first start may have compiled graphs."""
    for name, configuration in configurations.items():
        first, *later = configuration.get("starts") or [None]
        if first is None:
            continue
        line = f"{name}: ready after {first['ready_s']:.1f} s"
        if graphs := first.get("compiled_graphs"):
            line += f", {first['compile_s']:.1f} s of it for {graphs} graphs that had to be compiled, once"
        if later:
            line += f"; later {fmean(one['ready_s'] for one in later):.1f} s on average"
        yield line


def _ratio(cell: Cell, name: str, _: str) -> str:
    found = (cell["relative"] or {}).get(name)
    if found is None:
        return "-"
    if found["verdict"] == FEW:
        return f"x{found['ratio']:.3g}?"
    word = "none" if found["verdict"] == NOISE else f"x{found['ratio']:.3g}"
    return f"{word} ({found['low']:.3g}-{found['high']:.3g})"


def _table(cells: Sequence[Cell], show: Callable[[Cell, str, str], str]) -> str:
    rows = [["configuration", "concurrency", *(heading for heading, _, _ in COLUMNS)]]
    for cell in cells:
        load = "open" if cell["concurrency"] is None else str(cell["concurrency"])
        rows.append([cell["configuration"], load, *(show(cell, name, shape) for _, name, shape in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *rest in rows:
        figures = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *figures]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _with_spread(cell: Cell, name: str, shape: str) -> str:
    value, spread = _figure(cell, name), _figure(cell, f"{name}_std")
    if value is None:
        return "-"
    return f"{value:{shape}}" if spread is None else f"{value:{shape}} ±{spread:.2g}"


def _figure(cell: Cell, name: str) -> float | None:
    value: Any = cell
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
