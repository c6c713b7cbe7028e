"""A control for each setting that an ablation is about: toggles, chunks, replicas, and the load."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import ipywidgets
import yaml

from omni_lab.workbench.variation import Settings

TOLD = {
    "optimizations.batching": "all sequences that wait share a step; off: one at a time in each stage",
    "optimizations.graphs.*": "the stage's step is a replay of its graph; off: operator by operator",
    "optimizations.async_chunk": "the Talker hands its frames over in chunks; off: the whole answer at once",
    "optimizations.async_output": "a thread beside the step loop builds and sends payloads; off: between two steps",
    "optimizations.hot_path.decode_only_handoff": "a chunk carries its new rows; off: the whole stream so far",
    "optimizations.hot_path.row_payloads": "rows travel as they are; off: as one serialized blob",
    "optimizations.hot_path.code_predictor": "own predictor of the 15 codes; off: one generate() for each frame",
    "optimizations.hot_path.resident_state": "rows are updated in place; off: gathered and sent each step",
    "optimizations.hot_path.linear_positions": "one position a token in the Talker; off: three axes",
    "optimizations.hot_path.single_process_executor": "the network is in its worker; off: in a further process",
    "optimizations.stateful_code2wav": "layers go on where they stopped; off: left context is decoded again",
    "chunking.initial_frames": "codec frames of the first chunk, if there is no ramp",
    "chunking.frames": "codec frames of every later chunk",
    "chunking.ramp": "codec frames of the first chunks, such as 4, 8, 16; empty: no ramp",
    "chunking.text_tokens": "text tokens of the Thinker's hand-offs, such as 1, 1, 2, 4, 8; the last repeats",
    "stages.*.replicas": "workers of the stage",
    "workload.concurrency": "requests in flight, such as 1, 16: a cell for each",
    "workload.num_prompts": "requests of a cell: one number, or one for each cell",
    "workload.repeats": "how often each cell is measured; an interval needs two at least",
}
"""What a control does, shown while the pointer rests on it."""

GROUPS = {
    "Steps": ("optimizations.batching",),
    "Captured steps (graphs)": ("optimizations.graphs.",),
    "Between stages": ("optimizations.async_chunk", "optimizations.async_output", "optimizations.stateful_code2wav"),
    "Hot path": ("optimizations.hot_path.",),
    "Chunks, in codec frames": ("chunking.initial_frames", "chunking.frames", "chunking.ramp"),
    "Chunks, in text tokens": ("chunking.text_tokens",),
    "Replicas": ("stages.thinker.replicas", "stages.talker.replicas", "stages.code2wav.replicas"),
    "Load": ("workload.concurrency", "workload.num_prompts", "workload.repeats"),
}
"""Keys by heading; one that ends in a dot stands for all below it."""

LABELS = {
    "chunking.initial_frames": "first",
    "chunking.frames": "later",
    "workload.concurrency": "in flight",
    "workload.num_prompts": "requests",
}


class Controls(ipywidgets.HBox):
    """`moved` hears key and value of a control that the user has moved; `show` says what they stand at."""

    def __init__(self, base: Settings, moved: Callable[[str, Any], object]) -> None:
        self.base = base
        self.moved = moved
        self.controls: dict[str, ipywidgets.Widget] = {}
        groups = [self._group(heading, keys) for heading, keys in GROUPS.items()]
        super().__init__(groups, layout={"flex_flow": "row wrap", "grid_gap": "4px 28px"})

    def show(self, changed: Settings) -> None:
        """Moves all controls to the base's values and what is changed of them; what one cannot hold is not shown."""
        for key, control in self.controls.items():
            value = changed.get(key, self.base[key])
            if read(control) != value and _holds(control, value):
                control.value = written(control, value)

    def lock(self, locked: bool) -> None:
        """While a run is going on nothing can be moved."""
        for control in self.controls.values():
            control.disabled = locked

    def _group(self, heading: str, wanted: tuple[str, ...]) -> ipywidgets.VBox:
        keys = [
            key for key in self.base if any(key == one or (one[-1] == "." and key.startswith(one)) for one in wanted)
        ]
        keys.sort(key=lambda key: next(place for place, one in enumerate(wanted) if key.startswith(one)))
        for key in keys:
            self.controls[key] = control = _control(key, self.base[key])
            control.observe(lambda change, key=key: self.moved(key, read(change["owner"])), "value")
        title = ipywidgets.HTML(f"<b>{heading}</b>")
        return ipywidgets.VBox([title, *(self.controls[key] for key in keys)])


def read(control: ipywidgets.Widget) -> Any:
    """The value of a control: a list is typed as its items; what is none stays text, which the experiment refuses."""
    if not isinstance(control, ipywidgets.Text):
        return control.value
    try:
        return yaml.safe_load(f"[{control.value}]") or None
    except yaml.YAMLError:
        return control.value


def _holds(control: ipywidgets.Widget, value: Any) -> bool:
    return isinstance(control, ipywidgets.Text) or type(value) is type(control.value)  # 2.5 is not to become 2


def written(control: ipywidgets.Widget, value: Any) -> Any:
    """A value as its control has it."""
    if not isinstance(control, ipywidgets.Text):
        return value
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _control(key: str, value: Any) -> ipywidgets.Widget:
    *above, leaf = key.split(".")
    label = LABELS.get(key) or (above[-1] if leaf == "replicas" else leaf).replace("_", " ")
    look = {"description": label, "tooltip": next(told for one, told in TOLD.items() if fnmatch(key, one))}
    if isinstance(value, bool):
        return ipywidgets.Checkbox(value, indent=False, layout={"width": "auto"}, **look)
    narrow = {"layout": {"width": "190px"}, "style": {"description_width": "70px"}}
    if isinstance(value, int):
        return ipywidgets.IntText(value, **look, **narrow)
    text = ipywidgets.Text(continuous_update=False, **look, **narrow)
    text.value = written(text, value)
    return text
