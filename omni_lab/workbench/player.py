"""The audio player of the notebooks: takes of a sentence on one time axis, to hear, to compare and to doubt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import anywidget
import numpy as np
import traitlets

from omni_lab.views import theme
from omni_lab.workbench.abx import score
from omni_lab.workbench.module import css, esm
from omni_lab.workbench.take import Take, take_of, takes

__all__ = ["AudioPlayer", "Take", "take_of", "takes"]

MODES = ("speech", "received", "difference", "abx")


class AudioPlayer(anywidget.AnyWidget):
    """Plays takes: waveform, chunk arrivals and playback buffer above one time axis, with the silences marked.

    `takes`: what can be heard; may be set to others. `mode`: "speech" plays without the waits between chunks,
    "received" with the true arrival times from the moment of the request on, "difference" plays B minus A, "abx" is
    a blind test. `current`, `a`, `b`: indices of the take that is heard and of the two that are compared. `playing`
    and `position_s`, in the speech, follow the browser and may be set; it plays nothing before the first click in
    the page. `speed`: 0.5 to 2, at the same pitch (in comparisons it follows). `region`: [start, stop] in the speech,
    empty for all; `loop` repeats it. `chunk`: index of the chunk that is inspected, -1 for none. `gain_db`: of the
    difference. `heard`: "a", "b" or "x" in a blind test; `trials`: its answers, each {"a", "b": indices, "x",
    "answer": "a" or "b"}; `score`: what those about the present pair say (`abx.Score`).

    Keys: space, arrows (shift: small steps), up and down for the takes, a, b, x, l for the loop, [ and ] for the
    chunks, home, end, escape. Ctrl and the wheel zoom, shift and the wheel move.
    """

    _esm = esm("player")
    _css = css("card", "player") + f".omni-player {{ {theme.css()} }}"

    takes = traitlets.List(traitlets.Instance(Take)).tag(
        sync=True, to_json=lambda found, _: [message(take, index) for index, take in enumerate(found)]
    )
    current = traitlets.Int(0).tag(sync=True)
    a = traitlets.Int(0).tag(sync=True)
    b = traitlets.Int(0).tag(sync=True)
    mode = traitlets.Enum(MODES, "speech").tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    position_s = traitlets.Float(0.0).tag(sync=True)
    speed = traitlets.Float(1.0, min=0.5, max=2.0).tag(sync=True)
    loop = traitlets.Bool(False).tag(sync=True)
    region = traitlets.List(traitlets.Float(min=0.0)).tag(sync=True)
    chunk = traitlets.Int(-1).tag(sync=True)
    gain_db = traitlets.Float(0.0, min=0.0, max=90.0).tag(sync=True)
    heard = traitlets.Enum(("a", "b", "x"), "a").tag(sync=True)
    trials = traitlets.List(traitlets.Dict()).tag(sync=True)
    score = traitlets.Dict().tag(sync=True)

    def __init__(self, takes: Sequence[Take] = (), **traits: Any) -> None:
        super().__init__(takes=list(takes))
        with self.hold_sync():
            for name, value in traits.items():
                setattr(self, name, value)

    @traitlets.validate("current", "a", "b")
    def _is_take(self, proposal: dict[str, Any]) -> int:
        index, name = proposal["value"], proposal["trait"].name
        if not 0 <= index < max(1, len(self.takes)):
            raise traitlets.TraitError(f"{name}: expected the index of one of {len(self.takes)} takes, found {index}")
        return index

    @traitlets.validate("region")
    def _is_span(self, proposal: dict[str, Any]) -> list[float]:
        region = proposal["value"]
        if region and not (len(region) == 2 and region[0] < region[1]):
            raise traitlets.TraitError(f"region: expected [start, stop] in seconds or an empty list, found {region}")
        return region

    @traitlets.observe("takes")
    def _forget(self, change: dict[str, Any]) -> None:
        """Other takes begin at their start, the first two to be compared."""
        with self.hold_sync():
            self.playing, self.position_s, self.current, self.chunk, self.mode = False, 0.0, 0, -1, "speech"
            self.region, self.trials = [], []
            self.a, self.b = 0, min(1, max(0, len(self.takes) - 1))

    @traitlets.observe("trials", "a", "b")
    def _count(self, _: dict[str, Any]) -> None:
        self.score = self._scored()

    @traitlets.default("score")
    def _scored(self) -> dict[str, Any]:
        found = score(trial for trial in self.trials if (trial["a"], trial["b"]) == (self.a, self.b))
        return {**asdict(found), "p_value": found.p_value, "verdict": found.verdict}


def message(take: Take, index: int) -> dict[str, Any]:
    """What the browser gets of a take: its samples as binary little-endian `data`, in 16 bits where that loses nothing.

    A recording is read from 16 bits; a live take has more.
    """
    whole = np.clip(np.rint(take.samples * 32768), -32768, 32767)
    lossless = bool(np.array_equal(whole / np.float32(32768), take.samples))
    return {
        "label": take.label,
        "text": take.text,
        "facts": dict(take.facts),
        "color": take.color or theme.PALETTE[index % len(theme.PALETTE)],
        "peak": float(np.abs(take.samples).max(initial=0.0)),
        "sample_rate": take.sample_rate,
        "arrivals_ms": [float(time) for time in take.arrivals_ms],
        "chunk_samples": [int(count) for count in take.chunk_samples],
        "chunk_frames": [int(count) for count in take.chunk_frames],
        "encoding": "int16" if lossless else "float32",
        "data": whole.astype("<i2").tobytes() if lossless else take.samples.astype("<f4").tobytes(),
    }
