"""A widget's code as one ES module and one style sheet: what anywidget loads without a server or a build step."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
IMPORT = re.compile(r"^import\s[^;]*?from\s+[\"']\./(\w+)\.js[\"'];[ \t]*\n", re.MULTILINE)


def esm(name: str) -> str:
    """The module of widget `name`, with its neighbours put in front, each once, and the import lines dropped.

    An anywidget module cannot import a neighbour: it is loaded from text. All share one scope, so names at their top
    level must differ, and an import may not rename. Raises FileNotFoundError if the package has no such module.
    """
    parts: dict[str, str] = {}

    def gather(module: str) -> None:
        source = (HERE / f"{module}.js").read_text("utf-8")
        for neighbour in IMPORT.findall(source):
            if neighbour not in parts:
                gather(neighbour)
        parts[module] = IMPORT.sub("", source)

    gather(name)
    return "\n".join(parts.values())


def css(*names: str) -> str:
    """These style sheets, one behind the other."""
    return "\n".join((HERE / f"{name}.css").read_text("utf-8") for name in names)
