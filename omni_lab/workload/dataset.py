"""Sets of prompts: the bundled sentences, Seed-TTS sets, and JSONL files of chat requests."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from omni_lab import zoo
from omni_lab.experiment import ExperimentError
from omni_lab.settings import SamplingConfig, Settings, StageName, WorkloadConfig

MEDIA = ("audio", "image", "video")


class ChatLine(Settings):
    """One line of a JSONL set: a chat request. What it leaves out comes from the experiment."""

    id: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    speaker: str | None = None
    modalities: list[str] | None = Field(None, min_length=1)
    sampling: dict[StageName, SamplingConfig] = Field({})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One entry of a set. `text` is what a "read this" entry asks to be spoken; None where it is not known."""

    name: str
    messages: list[dict[str, Any]]
    text: str | None = None
    speaker: str | None = None
    modalities: tuple[str, ...] | None = None
    sampling: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For single stages, the keys of `core.Sampling` that the entry states."""


@dataclass(frozen=True, slots=True)
class Dataset:
    path: Path
    prompts: list[Prompt]
    skipped: int
    """Lines without a text to be spoken."""

    def take(self, count: int, seed: int | None) -> list[Prompt]:
        """`count` prompts in an order drawn with `seed` (None: file order), from the start again when they run out."""
        prompts = list(self.prompts)
        if seed is not None:
            random.Random(seed).shuffle(prompts)
        return list(islice(cycle(prompts), count))


def load_dataset(workload: WorkloadConfig) -> Dataset:
    """The set that the workload names. Raises ExperimentError naming file and line."""
    path = zoo.bundled_set() if workload.dataset == "bundled" else _file(Path(workload.dataset))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: expected a readable UTF-8 text file: {error}") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        dataset = Dataset(path, [_chat_line(path, number, line) for number, line in numbered], 0)
    else:
        read = [_seed_tts_line(line, workload) for _, line in numbered]
        dataset = Dataset(path, [prompt for prompt in read if prompt], read.count(None))
    if not dataset.prompts:
        expected = "a line of `utterance|reference text|reference wav|text`, or of JSON in a .jsonl file"
        raise ExperimentError(
            f"{path}: expected at least one prompt, {expected}; all {len(numbered)} lines were skipped"
        )
    return dataset


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / "meta.lst", path / "en" / "meta.lst", path / "zh" / "meta.lst"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ExperimentError(f"{path}: expected a Seed-TTS root with meta.lst, en/meta.lst or zh/meta.lst in it")


def _seed_tts_line(line: str, workload: WorkloadConfig) -> Prompt | None:
    """`utterance|reference text|reference wav|text[|more]`: a request to read the text; None without a text.

    The reference is for cloning a voice, which Qwen3-Omni's fixed speakers do not do, so it is not sent.
    """
    name, *rest = (part.strip() for part in line.split("|"))
    if len(rest) < 3 or not rest[2]:
        return None
    text = rest[2]
    return Prompt(name, reading(workload, text), text)


def reading(workload: WorkloadConfig, text: str) -> list[dict[str, Any]]:
    """The messages that ask for a text to be read."""
    messages = [{"role": "user", "content": workload.prompt_template.replace("{text}", text)}]
    if workload.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": workload.system_prompt})
    return messages


def _chat_line(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    try:
        chat = ChatLine.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise ExperimentError(f"{where}: expected a JSON object: {error}") from None
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(
            map(str, (*mistake["loc"], *([mistake["ctx"]["key"]] if "key" in mistake.get("ctx", {}) else [])))
        )
        raise ExperimentError(f"{where}: {key or 'the line'}: {mistake['msg']}") from None
    return Prompt(
        name=chat.id or f"line_{number}",
        messages=[_with_paths(message, path.parent) for message in chat.messages],
        speaker=chat.speaker,
        modalities=tuple(chat.modalities) if chat.modalities else None,
        sampling={stage: config.model_dump(exclude_unset=True) for stage, config in chat.sampling.items()},
    )


def _with_paths(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The message with its media files' paths, which are relative to the set's folder, made absolute."""
    if not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_with_path(part, folder) for part in message["content"]]}


def _with_path(part: Any, folder: Path) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    source = part.get(kind) if kind in MEDIA else None
    if isinstance(kind, str) and kind.removesuffix("_url") in MEDIA and isinstance(part.get(kind), dict):
        url = part[kind].get("url")
        return part | {kind: part[kind] | {"url": str(folder / url)}} if _is_path(url) else part
    if isinstance(source, list):
        return part | {kind: [str(folder / item) if _is_path(item) else item for item in source]}
    return part | {kind: str(folder / source)} if _is_path(source) else part


def _is_path(source: Any) -> bool:
    return isinstance(source, str) and not source.startswith(("data:", "http://", "https://", "file://"))
