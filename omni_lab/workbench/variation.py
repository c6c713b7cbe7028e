"""A variation of an experiment: what it changes, as settings, as a command, and as configurations to run."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from omni_lab.experiment import Experiment, load_configurations
from omni_lab.settings import merge

Settings = Mapping[str, Any]
"""Values by their dotted key, such as {"optimizations.batching": False}."""

VARIED = re.compile(r"optimizations\.|chunking\.|stages\.\w+\.replicas$")
"""Keys that make a configuration another one. All others are common to what is measured side by side."""

MISSING = "no such key"

NAME = 60
"""Characters of a name that is made up."""


@dataclass(frozen=True)
class Variation:
    """`changed` over the base, which is an experiment's file with `start` laid over it.

    `beside`: the base is run in turn with the variation, so that their ratio is of one run.
    """

    file: Path
    base: Experiment
    start: Settings
    changed: Settings
    name: str
    beside: bool

    def overrides(self) -> list[str]:
        """What `--set` says. In a sweep what is varied stands in its rungs: an override would be laid over both."""
        every = {**self.start, **self.changed}
        if not self.beside:
            alone = {"sweep": None} if self.base.sweep else {}
            return assignments({**every, **alone, "name": self.name})
        common = {key: value for key, value in every.items() if not VARIED.match(key)}
        rungs = [_rung(self.base.name, self.start), _rung(self.name, every)]
        return assignments({**common, "sweep.rungs": rungs})

    def configurations(self) -> tuple[Experiment, list[Experiment]]:
        """The experiment and what it runs. Raises ExperimentError as the command does."""
        return load_configurations(self.file, self.overrides())

    def command(self, root: Path) -> str:
        """The command that does the same in the folder `root`, a setting a line."""
        file = self.file.relative_to(root) if self.file.is_relative_to(root) else self.file
        lines = [f"python -m omni_lab.run {shlex.quote(str(file))}"]
        return " \\\n    ".join([*lines, *(f"--set {shlex.quote(one)}" for one in self.overrides())])


def made_up_name(base: Experiment, changed: Settings) -> str:
    """A name that says what is varied, such as no_batching or graph_talker-initial_frames_8."""
    words = [_word(key, value) for key, value in changed.items() if VARIED.match(key)]
    if not words:
        return f"{base.name}_again"
    name = "-".join(words)
    for shown in range(len(words) - 1, 0, -1):
        if len(name) > NAME:
            name = "-".join([*words[:shown], f"and_{len(words) - shown}_more"])
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_")


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested maps as values by dotted key; lists and empty maps are values."""
    if not (isinstance(values, dict) and values):
        return {prefix: values}
    parts = (flat(value, f"{prefix}.{key}" if prefix else key) for key, value in values.items())
    return {key: value for part in parts for key, value in part.items()}


def assignments(settings: Settings) -> list[str]:
    """Settings as `--set` takes them, each in one line of YAML."""
    return [f"{key}={_in_a_line(value)}" for key, value in settings.items()]


def _in_a_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False, allow_unicode=True)
    text = text.strip().removesuffix("\n...")
    return json.dumps(value) if "\n" in text else text  # a text of several lines; JSON is YAML too


def _rung(name: str, settings: Settings) -> dict[str, Any]:
    return nested({"name": name} | {key: value for key, value in settings.items() if VARIED.match(key)})


def nested(settings: Settings) -> dict[str, Any]:
    """The opposite of `flat`."""
    return reduce(merge, (_nest(key.split("."), value) for key, value in settings.items()), {})


def _nest(path: Iterable[str], value: Any) -> Any:
    for part in reversed(list(path)):
        value = {part: value}
    return value


def _word(key: str, value: Any) -> str:
    *above, leaf = key.split(".")
    if above[-1] == "graphs":
        leaf = f"graph_{leaf}"
    if leaf == "replicas":
        leaf = f"{above[-1]}_replicas"
    if value is None or isinstance(value, bool):
        return leaf if value else f"no_{leaf}"
    numbers = value if isinstance(value, list) else [value]
    return "_".join(map(str, [leaf, *numbers]))
