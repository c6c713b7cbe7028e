"""Perfetto's own page in a frame, with a trace that does not leave the browser."""

from __future__ import annotations

import gzip
from pathlib import Path

import anywidget
import traitlets

LARGEST = 50_000_000
"""Bytes of a compressed trace that are sent to the page at most."""

COMPRESSED = b"\x1f\x8b"
"""How a gzip file begins."""


class PerfettoFrame(anywidget.AnyWidget):
    """ui.perfetto.dev in a frame, which is handed a trace file as its documentation describes.

    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui. The page comes from the internet; the trace
    goes from this browser's tab to its frame and nowhere else. `state` tells how far it is: "waiting", "shown" or
    "unreachable". Raises OSError if the file cannot be read, ValueError if it is too large.
    """

    _esm = Path(__file__).with_name("perfetto.js").read_text("utf-8")

    trace = traitlets.Bytes().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    state = traitlets.Unicode("waiting").tag(sync=True)

    def __init__(self, file: Path | str) -> None:
        content = Path(file).read_bytes()
        if not content.startswith(COMPRESSED):
            content = gzip.compress(content, compresslevel=6)
        if len(content) > LARGEST:
            size = f"{len(content) / 1e6:.0f} MB compressed"
            raise ValueError(
                f"{file}: {size}, expected at most {LARGEST / 1e6:.0f}; open it at https://ui.perfetto.dev"
            )
        super().__init__(trace=content, title=Path(file).name)
