"""Stop texts: where an answer ends before the model would end it."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Text up to the first of `stops`. What could still become one of them is held back until it is decided."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str, final: bool) -> str:
        """The text that may be shown now; `found` is set once a stop text was there, and nothing follows it."""
        if not self.stops or self.found:
            return "" if self.found else text
        text = self.held + text
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self.held = True, ""
            return text[: min(places)]
        kept = 0 if final else max(_begun(text, stop) for stop in self.stops)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next(length for length in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:length]))
