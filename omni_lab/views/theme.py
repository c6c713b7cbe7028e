"""One look for every figure: a plotly template for light paper and one for dark screens."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio

LIGHT, DARK = "omni_lab", "omni_lab_dark"

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C8C8C")
"""Colours that the common kinds of colour blindness keep apart (Okabe and Ito, "Color Universal Design", 2008).

Their yellow vanishes on white and their black on a dark screen; one grey stands in for both.
"""
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY = PALETTE

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down", "hexagon", "pentagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def template(dark: bool = False) -> go.layout.Template:
    """The template. Colours of paper, ink and grid change with `dark`; those of the data never do."""
    ink, grid, line = ("#e6e6e6", "#33373d", "#6b7280") if dark else ("#1f2328", "#e4e7eb", "#8b949e")
    paper = "#16181d" if dark else "#ffffff"
    axis = {
        "gridcolor": grid,
        "linecolor": line,
        "zerolinecolor": line,
        "showline": True,
        "ticks": "outside",
        "tickcolor": line,
        "automargin": True,
        "exponentformat": "none",
        "separatethousands": True,
        "title": {"standoff": 8, "font": {"size": 12}},
    }
    layout = go.Layout(
        font={"family": FONT, "size": 13, "color": ink},
        title={"x": 0, "xref": "paper", "font": {"size": 16}},
        paper_bgcolor=paper,
        plot_bgcolor=paper,
        colorway=PALETTE,
        xaxis=axis,
        yaxis=axis,
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "title": {"text": ""}},
        margin={"l": 8, "r": 12, "t": 48, "b": 8},
        hoverlabel={"font": {"family": FONT}, "align": "left"},
        bargap=0.25,
    )
    return go.layout.Template(layout=layout)


def css() -> str:
    """The palette as custom properties of CSS: `--blue: #0072B2;` and so on."""
    names = ("blue", "orange", "green", "vermilion", "sky", "purple", "grey")
    return " ".join(f"--{name}: {color};" for name, color in zip(names, PALETTE, strict=True))


def register() -> None:
    """Makes both templates known to plotly under their names."""
    pio.templates[LIGHT] = template()
    pio.templates[DARK] = template(dark=True)


def empty(figure: go.Figure) -> go.Figure:
    """The figure with a word in place of axes: there is nothing to show."""
    note = {"text": "not measured", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    figure.add_annotation(note)
    return figure.update_layout(xaxis_visible=False, yaxis_visible=False, height=140)


def style(names: pd.Series) -> dict[str, dict[str, str]]:
    """Colour, symbol and dash of each name, in order; more names than colours differ in symbol and dash.

    A categorical's order counts, with what is missing in `names`: a configuration looks the same in all figures.
    """
    order = names.cat.categories if isinstance(names.dtype, pd.CategoricalDtype) else names.unique()
    return {
        name: {
            "color": PALETTE[i % len(PALETTE)],
            "symbol": SYMBOLS[i % len(SYMBOLS)],
            "dash": DASHES[(i + i // len(PALETTE)) % len(DASHES)],
        }
        for i, name in enumerate(order)
    }


register()
