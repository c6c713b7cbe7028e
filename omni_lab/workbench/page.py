"""The look of plotly figures on a notebook's page, whose theme the kernel does not know."""

from __future__ import annotations

from IPython.display import HTML

from omni_lab.views import theme

DARK = 'body[data-jp-theme-light="false"], body.vscode-dark, body.vscode-high-contrast'
"""How JupyterLab and VS Code say that their theme is dark."""


def follow_theme() -> HTML:
    """Show this once in a notebook: from then on its figures are dark where JupyterLab or VS Code is.

    Figures are drawn with the light template; in a dark theme the page takes its paper away and lays the dark one's
    ink and grid over it. Colours of the data are the same in both.
    """
    layout = theme.template(dark=True).layout
    axis = layout.xaxis
    return HTML(
        f"<style>:is({DARK}) .js-plotly-plot {{\n"
        "  & .main-svg:first-of-type { background: none !important; }\n"
        "  & :is(.bglayer .bg, .legend .bg) { fill: none !important; }\n"
        f"  & :is(.infolayer, .xaxislayer-above, .yaxislayer-above, .textpoint) text {{ fill: {layout.font.color} "
        "!important; }\n"
        f"  & .gridlayer path {{ stroke: {axis.gridcolor} !important; }}\n"
        f"  & :is(.zerolinelayer path, .ticks, .xlines-above, .ylines-above) {{ stroke: {axis.linecolor} "
        "!important; }\n"
        "}</style>"
    )
