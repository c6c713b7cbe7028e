"""A report's table in a notebook."""

from __future__ import annotations

from html import escape

from IPython.display import HTML

from omni_lab.views.tables import Table

WEIGHT = {"better": "font-weight:600", "worse": "font-weight:600;text-decoration:underline", "missing": "opacity:0.6"}
"""How a cell of a kind is set apart, without colour; other kinds are plain."""


def table(content: Table | None) -> HTML:
    """The table as HTML: bold is better, bold and underlined is worse, pale was not measured."""
    if content is None:
        return HTML("<p>not measured</p>")
    head = "".join(f'<th scope="col" style="text-align:left">{escape(str(one))}</th>' for one in content["head"])
    rows = "".join(f"<tr>{''.join(_cell(one) for one in row)}</tr>" for row in content["rows"])
    return HTML(
        f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cell(content: dict[str, str] | str) -> str:
    if isinstance(content, str):
        return f'<th scope="row" style="text-align:left">{escape(content)}</th>'
    look = f"text-align:left;white-space:nowrap;{WEIGHT.get(content['kind'], '')}"
    return f'<td style="{look}">{escape(content["text"])}</td>'
