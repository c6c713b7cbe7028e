"""The experiment: one validated object out of YAML files, `--set` overrides and this machine's section.

`python -m omni_lab.experiment` writes the JSON schema of experiment files to standard output.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from omni_lab import settings
from omni_lab.settings import did_you_mean, merge, wrong


class ExperimentError(ValueError):
    """The experiment, an option or an input file is wrong: one line for each mistake."""


class Experiment(settings.Settings):
    """Everything that one run needs to know. Attribute names are the keys of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    target: Literal["pipeline", "server", "vllm-omni"] = Field(
        "pipeline", description="in this process, served over HTTP by omni_lab.serve, or by vLLM-Omni"
    )
    model: settings.ModelConfig = settings.ModelConfig()
    stages: dict[settings.StageName, settings.StageConfig] = Field(
        {}, description="by name; maps merge with the defaults"
    )
    executor: Literal["inline", "process", "ray"] = "process"
    connector: Literal["in_process", "shared_memory", "mooncake"] = "shared_memory"
    chunking: settings.ChunkingConfig = settings.ChunkingConfig()
    optimizations: settings.OptimizationsConfig = settings.OptimizationsConfig()
    workload: settings.WorkloadConfig = settings.WorkloadConfig()
    profile: settings.ProfileConfig = settings.ProfileConfig()
    results: settings.ResultsConfig = settings.ResultsConfig()
    server: settings.ServerConfig = settings.ServerConfig()
    vllm_omni: settings.VllmOmniConfig = settings.VllmOmniConfig()
    platforms: dict[settings.Platform, dict[str, Any]] = Field(
        {}, description="laid over the rest on the machine that it names"
    )
    sweep: settings.SweepConfig | None = None

    @field_validator("stages", mode="before")
    @classmethod
    def _every_stage(cls, value: Any) -> Any:
        return merge(settings.STAGE_DEFAULTS, value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.executor != "inline" and self.connector == "in_process":
            message = f"in_process joins stages of one process; with executor {self.executor} expected shared_memory"
            raise wrong("connector", message)
        engines = {name: stage.engine for name, stage in self.stages.items()}
        if "transformers" in engines.values() and len(set(engines.values())) > 1:
            stated = ", ".join(f"{name}: {engine}" for name, engine in engines.items())
            raise wrong("stages", f"expected engine transformers on all stages or on none, got {stated}")
        replicas = {name: stage.replicas for name, stage in self.stages.items()}
        if "transformers" in engines.values() and len(set(replicas.values())) > 1:
            stated = ", ".join(f"{name}: {count}" for name, count in replicas.items())
            raise wrong("stages", f"engine transformers has all stages in one worker: expected as many, got {stated}")
        for stage, key in (("thinker", "text_tokens"), ("talker", "codec_frames")):
            length = getattr(self.workload.output, key)
            limit = self.stages[stage].max_model_len
            if length is not None and length >= limit:
                message = f"expected less than stages.{stage}.max_model_len ({limit}), got {length}"
                raise wrong(f"workload.output.{key}", message)
        return self


def unavailable(experiment: Experiment) -> list[str]:
    """What the experiment asks for and this version does not have: "key: reason" for each."""
    reasons = []
    for name, stage in experiment.stages.items():
        if stage.engine == "vllm" and name != "thinker":
            reasons.append(f"stages.{name}.engine: vllm runs the thinker alone; use torch")
        if stage.device == "emulated":
            reasons.append(f"stages.{name}.device: emulated is not available in this version; use cpu or cuda:N")
    if experiment.executor == "ray":
        reasons.append("executor: ray is not available in this version; use process or inline")
    if experiment.connector == "mooncake":
        reasons.append("connector: mooncake is not available in this version; use shared_memory")
    return reasons


@dataclass(frozen=True)
class Layer:
    """Settings from one place. `source` names it in messages."""

    source: str
    values: dict[str, Any]

    def states(self, path: Sequence[Any]) -> bool:
        node: Any = self.values
        for key in path:
            if not (isinstance(node, dict) and key in node) and not (
                isinstance(node, list) and key in range(len(node))
            ):
                return False
            node = node[key]
        return True


def load_experiment(path: Path | str, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a file and what it extends, this machine's section, then `overrides` ("a.b=YAML value").

    Raises ExperimentError with one line for each mistake: file (or override), key, what was expected.
    """
    return _build(_file_layers(Path(path)), _override_layers(overrides))


def load_configurations(path: Path | str, overrides: Iterable[str] = ()) -> tuple[Experiment, list[Experiment]]:
    """The experiment and what it runs: itself, or the rungs of its sweep.

    A rung is a file with what that extends, or a map in the sweep itself: what its own `extends` names, else what
    the sweeping file extends. Over it are laid the keys that the sweeping file states (and those of files that
    extend that), then the keys of the map, then the overrides. Raises ExperimentError.
    """
    files, stated = _file_layers(Path(path)), _override_layers(overrides)
    experiment = _build(files, stated)
    if experiment.sweep is None:
        return experiment, [experiment]
    source = next(layer.source for layer in reversed([*files, *stated]) if layer.states(["sweep", "rungs"]))
    first = next((i for i, layer in enumerate(files) if layer.states(["sweep"])), len(files) - 1)
    base, over, stated = files[:first], _common(files[first:]), _common(stated)
    rungs = []
    for index, rung in enumerate(experiment.sweep.rungs):
        place = f"{source}: sweep.rungs.{index}"
        below, own = (_file_layers(Path(rung)), []) if isinstance(rung, str) else _inline_layers(place, rung, base)
        if any(layer.states(["sweep", "rungs"]) for layer in below):
            file = rung if isinstance(rung, str) else rung["extends"]
            raise ExperimentError(f"{place}: expected an experiment without a sweep of its own, got {file}")
        rungs.append(_build([*below, *over, *own], stated))
    names = [rung.name for rung in rungs]
    for name in names:
        if names.count(name) > 1:
            raise ExperimentError(f"{source}: sweep.rungs: expected experiments of different names, got {name!r} twice")
    return experiment, rungs


def twins(rungs: Sequence[Experiment]) -> Iterator[str]:
    """One sentence for each experiment that differs from an earlier one in its name alone."""
    contents = [rung.model_dump(exclude={"name"}) for rung in rungs]
    for index, content in enumerate(contents):
        if content in contents[:index]:
            other = rungs[contents.index(content)].name
            yield (
                f"{rungs[index].name} is the same experiment as {other}: what the sweeping file states is laid over "
                "every rung"
            )


def _common(layers: Iterable[Layer]) -> list[Layer]:
    """What a sweep lays over all its rungs."""
    return [
        Layer(layer.source, {key: value for key, value in layer.values.items() if key not in ("name", "sweep")})
        for layer in layers
    ]


def _inline_layers(place: str, rung: dict[str, Any], base: list[Layer]) -> tuple[list[Layer], list[Layer]]:
    """A rung that is a map: the layers below it, and its own."""
    values = dict(rung)
    if "extends" in values:
        base = _base_layers(place, values.pop("extends"))
    return base, [Layer(place, values)]


def _file_layers(path: Path, chain: tuple[Path, ...] = ()) -> list[Layer]:
    """The file and all that it extends, the base first."""
    if path.resolve() in chain:
        circle = " -> ".join(file.name for file in (*chain[chain.index(path.resolve()) :], path))
        raise ExperimentError(
            f"{path}: extends: expected files that do not extend each other in a circle, got {circle}"
        )
    values = _read(path)
    extends = values.pop("extends", None)
    layer = Layer(str(path), _anchored(values, path.parent))
    if extends is None:
        return [layer]
    return [*_base_layers(str(path), extends, path.parent, (*chain, path.resolve())), layer]


def _base_layers(place: str, extends: Any, folder: Path = Path(), chain: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of the file that `place` extends."""
    if not isinstance(extends, str):
        raise ExperimentError(f"{place}: extends: expected the name of one experiment file, got {extends!r}")
    base = folder / extends
    if not base.is_file():
        raise ExperimentError(f"{place}: extends: expected an experiment file, there is none at {base}")
    return _file_layers(base, chain)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ExperimentError(f"{path}: expected an experiment file (YAML), there is none")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: {_yaml_message(error)}") from None
    if not isinstance(values, dict):
        found = "an empty file" if values is None else f"a {type(values).__name__}"
        raise ExperimentError(f"{path}: expected a mapping such as `name: my_run`, got {found}")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, which would keep the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                problem = f"expected each key once, got {key!r} twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.value[index][0].start_mark)
        return super().construct_mapping(node, deep)


def _yaml_message(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}expected YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"


def _override_layers(overrides: Iterable[str]) -> list[Layer]:
    layers = []
    for text in overrides:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ExperimentError(f"--set {text}: expected KEY=VALUE, such as workload.concurrency=[1,16]")
        if path[0] == "extends":
            raise ExperimentError(f"--set {text}: extends: expected in a file only")
        try:
            node = yaml.load(value, _UniqueKeys)
        except yaml.YAMLError as error:
            raise ExperimentError(f"--set {text}: {key}: {_yaml_message(error)}") from None
        for part in reversed(path):
            node = {part: node}
        layers.append(Layer(f"--set {text}", _anchored(node, Path())))
    return layers


def _anchored(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`values` with its relative paths made absolute: they are relative to the file that states them."""

    def absolute(path: Any) -> Any:
        return str((folder / Path(path).expanduser()).resolve()) if isinstance(path, str) and path else path

    def beside(path: Any) -> Any:  # unresolved: an environment's Python is a link
        return os.path.normpath(folder.absolute() / Path(path).expanduser()) if isinstance(path, str) else path

    def anchored_rung(rung: Any) -> Any:
        if not isinstance(rung, dict):
            return absolute(rung)
        extends = {"extends": absolute(rung["extends"])} if "extends" in rung else {}
        return _anchored(rung, folder) | extends

    workload, model, sweep, server, peer = (
        values.get(key) for key in ("workload", "model", "sweep", "server", "vllm_omni")
    )
    if isinstance(workload, dict) and workload.get("dataset", "bundled") != "bundled":
        values = merge(values, {"workload": {"dataset": absolute(workload["dataset"])}})
    if isinstance(model, dict) and "/" in str(model.get("checkpoint")):
        values = merge(values, {"model": {"checkpoint": absolute(model["checkpoint"])}})
    if isinstance(server, dict) and server.get("media_dir"):
        values = merge(values, {"server": {"media_dir": absolute(server["media_dir"])}})
    if isinstance(peer, dict) and "/" in str(peer.get("executable")):
        values = merge(values, {"vllm_omni": {"executable": beside(peer["executable"])}})
    if isinstance(sweep, dict) and isinstance(sweep.get("rungs"), list):
        values = merge(values, {"sweep": {"rungs": [anchored_rung(rung) for rung in sweep["rungs"]]}})
    return values


def _build(files: list[Layer], overrides: list[Layer]) -> Experiment:
    """Merges and validates. Every machine's section is checked, and that of this one is laid over the files."""
    experiment = _validated([*files, *overrides])
    layers = [*files, *overrides]
    for platform, section in experiment.platforms.items():
        source = next(layer.source for layer in reversed(layers) if layer.states(["platforms", platform]))
        for key in ("name", "platforms", "sweep", "extends"):
            if key in section:
                raise ExperimentError(f"{source}: platforms.{platform}.{key}: expected outside of platforms")
        special = [*files, Layer(f"{source}: platforms.{platform}", section), *overrides]
        candidate = _validated(special)
        if platform == detected_platform():
            experiment, layers = candidate, special
    mistakes = [_line(layers, key.split("."), message) for key, message in _misfits(experiment)]
    if mistakes:
        raise ExperimentError("\n".join(mistakes))
    return experiment


def _validated(layers: list[Layer]) -> Experiment:
    try:
        return Experiment.model_validate(reduce(merge, (layer.values for layer in layers)))
    except ValidationError as error:
        lines = (_line(layers, *_explained(mistake)) for mistake in error.errors())
        raise ExperimentError("\n".join(dict.fromkeys(lines))) from None


def _line(layers: list[Layer], path: Sequence[Any], message: str) -> str:
    """The message behind its key and the last place that states that key, or the most of its path."""
    parts = [list(path[:length]) for length in range(len(path), -1, -1)]
    source = next(layer.source for part in parts for layer in reversed(layers) if layer.states(part))
    return f"{source}: {'.'.join(map(str, path))}: {message}"


def _explained(mistake: Any) -> tuple[list[Any], str]:
    """Key path and message of one of pydantic's errors, the nearest known word included."""
    path, kind, context = list(mistake["loc"]), mistake["type"], mistake.get("ctx", {})
    if kind == "wrong":
        return path + context["key"].split("."), context["message"]
    if kind == "unknown_key":
        key, known = context["key"], context["known"]
        hint = did_you_mean(key, known) or f"; expected one of {', '.join(known)}"
        return [*path, key], f"unknown key{hint}"
    if kind == "missing":
        return path, "expected a value, got none"
    if path[-1] == "[key]":
        path.pop()
    known = re.findall(r"'([^']*)'", context.get("expected", "")) if kind == "literal_error" else []
    expected = _EXPECTED.get(kind) or mistake["msg"].replace("Input should be ", "")
    hint = did_you_mean(mistake["input"], known)
    return path, f"expected {expected.format(**context)}, got {_shown(mistake['input'])}{hint}"


_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "some text",
    "string_type": "text",
    "too_short": "at least {min_length} item",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What pydantic's error kinds expect, in words of YAML."""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _misfits(experiment: Experiment) -> Iterable[tuple[str, str]]:
    """(key, message) of all that is well-formed and yet cannot run here."""
    from omni_lab import zoo  # imports torch, which a reader of the settings alone need not wait for

    media_dir = experiment.server.media_dir
    if media_dir and not Path(media_dir).is_dir():
        yield "server.media_dir", f"expected a directory, there is none at {media_dir}"
    dataset = experiment.workload.dataset
    if dataset != "bundled" and not Path(dataset).exists():
        expected = "bundled, a Seed-TTS root or meta.lst, or a .jsonl file"
        yield "workload.dataset", f"expected {expected}; there is nothing at {dataset}"
    checkpoint = experiment.model.checkpoint
    if not (Path(checkpoint) / "config.json").is_file() and checkpoint not in zoo.names():
        hint = did_you_mean(checkpoint, zoo.names())
        expected = f"{', '.join(zoo.names())}, or a directory with a config.json"
        yield "model.checkpoint", f"expected {expected}, got {checkpoint!r}{hint}"
    for name, stage in experiment.stages.items():
        if stage.device.startswith("cuda") and int(stage.device.partition(":")[2]) >= cuda_devices():
            yield f"stages.{name}.device", f"expected a device of this machine, it has no {stage.device}; use cpu"
    for reason in unavailable(experiment) + _unfit_for_target(experiment):
        key, _, message = reason.partition(": ")
        yield key, message


def _unfit_for_target(experiment: Experiment) -> list[str]:
    reasons = []
    if experiment.target != "pipeline" and experiment.profile.enabled:
        reasons.append(f"profile.enabled: expected false with target {experiment.target}; use target pipeline")
    if experiment.target == "vllm-omni":
        from omni_lab.peers.vllm_omni import without_counterpart

        reasons += without_counterpart(experiment)
    return reasons


def cuda_devices() -> int:
    """Number of CUDA devices; torch is imported only here, because most experiments never ask."""
    import torch

    return torch.cuda.device_count()


def detected_platform() -> Literal["cpu", "cuda"]:
    return "cuda" if cuda_devices() else "cpu"


def json_schema() -> dict[str, Any]:
    """The JSON schema of an experiment file, `extends` included."""
    schema = Experiment.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    extends = {"type": "string", "description": "an experiment file, relative to this one, that this one changes"}
    schema["properties"] = {"extends": extends} | schema["properties"]
    schema["$defs"]["SweepConfig"]["properties"]["rungs"]["items"] = {"anyOf": [{"type": "string"}, {"$ref": "#"}]}
    del schema["required"]
    return schema


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
