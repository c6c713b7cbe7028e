"""Figures as files, for pages and papers: PNG, SVG or PDF, drawn by a headless browser without network.

python -m omni_lab.views.export results/reference/ladder ladder ladder.png
"""

from __future__ import annotations

import dataclasses
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from PIL import Image

from omni_lab.command import DONE, FAILED, WRONG, Parser
from omni_lab.frames import Run, load
from omni_lab.views import buffers, checks, figures, ladder, request, steps, theme, timeline

FORMATS = ("png", "svg", "pdf", "webp", "jpeg")

FIGURES: dict[str, tuple[Callable[[Run, Namespace], go.Figure], str]] = {
    "ladder": (
        lambda run, chosen: ladder.figure(run.cells, _metric(run.cells, chosen, "request_throughput_per_s")),
        "--metric rung by rung, beside the published ladder",
    ),
    "loads": (
        lambda run, chosen: figures.by_concurrency(run.cells, _metric(run.cells, chosen, "request_throughput_per_s")),
        "--metric over concurrency",
    ),
    "distribution": (
        lambda run, chosen: figures.distribution(run.requests, _metric(run.requests, chosen, "audio_ttfp_ms")),
        "--metric of the single requests",
    ),
    "scatter": (lambda run, chosen: figures.ttfp_rtf(run.requests), "first audio against real-time factor"),
    "stages": (
        lambda run, chosen: figures.stage_bars(run.stages, _metric(run.stages, chosen, "busy_ratio")),
        "--metric of every stage",
    ),
    "causes": (
        lambda run, chosen: steps.causes(run.stages[run.stages["stage"] == chosen.stage]),
        "what the mean gap of --stage is made of",
    ),
    "gaps": (
        lambda run, chosen: steps.histogram(_loop(run, chosen)),
        "how long the gaps of --stage are at one --concurrency",
    ),
    "steps": (
        lambda run, chosen: timeline.timeline(_loop(run, chosen)),
        "steps of --stage around its median gap at one --concurrency",
    ),
    "request": (
        lambda run, chosen: request.timeline(_typical(run), run.steps, run.chunks),
        "a typical request of the first configuration on its way through the stages",
    ),
    "buffers": (
        lambda run, chosen: buffers.buffers(buffers.typical(run.requests)),
        "the listener's buffer while a typical request of each configuration plays",
    ),
}
"""Name of each figure on the command line, how it is made of a run, and what it shows."""


def save(
    figure: go.Figure,
    path: str | Path,
    dark: bool = False,
    width: int = 960,
    height: int | None = None,
    scale: float = 2.0,
) -> Path:
    """Draws a figure in a headless browser and writes it to `path`, whose suffix is one of FORMATS.

    `width` and `height` are in CSS pixels, the figure's own height if none is given; a PNG has `scale` pixels for each.
    `dark` lays the dark template on. Nothing is fetched: plotly.js is the installed package's, and MathJax stays away.
    Raises ValueError for another suffix, RuntimeError if kaleido or a browser is missing, each with what to install.
    """
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ValueError(f"{path}: no picture format; give it one of the suffixes .{', .'.join(FORMATS)}")
    try:
        import kaleido
        from kaleido.errors import BrowserFailedError, ChromeNotFoundError
    except ImportError as error:
        raise RuntimeError("kaleido draws the pictures: python -m pip install 'kaleido>=1.3,<2'") from error
    drawn = go.Figure(figure).update_layout(template=theme.DARK if dark else theme.LIGHT)
    options = {"format": kind, "width": width, "height": height or drawn.layout.height, "scale": scale}
    try:
        picture = kaleido.calc_fig_sync(drawn, opts=options, kopts={"mathjax": False})
    except ChromeNotFoundError as error:
        raise RuntimeError(
            "pictures are drawn by Chromium or Chrome, and none was found: install one (Debian: apt install chromium; "
            "anywhere: kaleido_get_chrome), or name its program in BROWSER_PATH"
        ) from error
    except BrowserFailedError as error:
        raise RuntimeError(f"the browser that should draw {path} ended: try it by hand, {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_packed(picture) if kind == "png" else picture)
    return path


def _packed(picture: bytes) -> bytes:
    """The same PNG in fewer bytes: the browser packs for speed."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(picture)).save(packed, "png", optimize=True)
    return packed.getvalue()


def only(run: Run, configurations: Sequence[str] = (), concurrency: float | None = None) -> Run:
    """The run with the rows of these configurations and this concurrency alone; everything where none are given.

    Configurations keep their order and look. Raises ValueError for what the run does not have.
    """
    known, loads = list(run.cells["configuration"].cat.categories), steps.loads_of(run.cells)
    if missing := set(configurations) - set(known):
        raise ValueError(f"{run.path} has no configuration {', '.join(sorted(missing))}; it has {', '.join(known)}")
    if concurrency is not None and concurrency not in loads:
        words = ", ".join(map(figures.load_label, loads))
        raise ValueError(f"{run.path} has no concurrency {concurrency:g}; it has {words}")

    def chosen(table: pd.DataFrame) -> pd.DataFrame:
        keep = pd.Series(True, table.index)
        if configurations:
            keep &= table["configuration"].isin(configurations)
        if concurrency is not None:
            keep &= steps.at_load(table, concurrency)
        return table[keep]

    names = ("cells", "stages", "ratios", "requests", "steps")
    return dataclasses.replace(run, **{name: chosen(getattr(run, name)) for name in names})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; prints the path of the picture. Returns the exit status."""
    parser = Parser(prog="python -m omni_lab.views.export", description="Draws a figure of a run as PNG, SVG or PDF.")
    shows = "; ".join(f"{name}: {words}" for name, (_, words) in FIGURES.items())
    parser.add_argument("run", help="run directory, such as results/reference/ladder")
    parser.add_argument("figure", choices=FIGURES, help=shows)
    parser.add_argument("picture", help="file to write; its suffix is the format")
    parser.add_argument("--configurations", default="", help="only these, with commas")
    parser.add_argument("--concurrency", type=float, help="only this one")
    parser.add_argument("--stage", default="talker", help="whose steps (default: %(default)s)")
    parser.add_argument("--metric", help="a column of Run.cells, Run.requests or Run.stages")
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    parser.add_argument("--width", type=int, default=960, help="CSS pixels (default: %(default)s)")
    parser.add_argument("--height", type=int, help="CSS pixels (default: the figure's)")
    parser.add_argument("--scale", type=float, default=2.0, help="pixels for each CSS pixel (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        run = load(chosen.run)
        run = dataclasses.replace(run, requests=checks.counted(run, run.requests), steps=checks.counted(run, run.steps))
        run = only(run, [name for name in chosen.configurations.split(",") if name], chosen.concurrency)
        figure = FIGURES[chosen.figure][0](run, chosen)
        if not figure.data:
            raise ValueError(f"{chosen.run} has nothing for the figure {chosen.figure}: not measured, or not kept")
        print(save(figure, chosen.picture, chosen.dark, chosen.width, chosen.height, chosen.scale))
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return WRONG
    except RuntimeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return FAILED
    return DONE


def _metric(table: pd.DataFrame, chosen: Namespace, usual: str) -> str:
    """The column to draw. Raises ValueError if it is none that has a name in a picture."""
    known = [name for name in table if name in figures.LABELS or name.removeprefix("mean_") in figures.LABELS]
    if chosen.metric and chosen.metric not in known:
        raise ValueError(f"--metric {chosen.metric}: this figure can show {', '.join(known)}")
    return chosen.metric or usual


def _loop(run: Run, chosen: Namespace) -> pd.DataFrame:
    """The steps of one stage at one concurrency. Raises ValueError if there are several to choose from."""
    own = run.steps[run.steps["stage"] == chosen.stage]
    if len(loads := steps.loads_of(own)) > 1:
        words = ", ".join(map(figures.load_label, loads))
        raise ValueError(f"{chosen.run} has steps at concurrency {words}: name one with --concurrency")
    return own


def _typical(run: Run) -> pd.Series:
    """A typical request of the first cell; an empty row if none gave audio."""
    rows = buffers.typical(run.requests)
    return rows.iloc[0] if len(rows) else pd.Series(dtype=object)


if __name__ == "__main__":
    sys.exit(main())
