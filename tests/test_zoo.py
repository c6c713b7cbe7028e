"""The embedded checkpoints: built whole, the same bytes each time, and readable by transformers' own classes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)

from omni_lab import zoo
from omni_lab.core import PipelineError
from omni_lab.zoo.__main__ import main
from tests.oracle import weights_digest


@pytest.mark.parametrize("name", ["nano", "voice"])
def test_transformers_loads_the_checkpoint(name: str) -> None:
    directory = zoo.path(name)
    _, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == config["im_start_token_id"]
    assert tokenizer("<|im_start|>user\n")["input_ids"] == [1001, config["user_token_id"], 1016]
    assert tokenizer.audio_token_id == config["thinker_config"]["audio_token_id"]
    assert WhisperFeatureExtractor.from_pretrained(directory).feature_size == 128
    assert Qwen2VLImageProcessor.from_pretrained(directory).patch_size == 16


def test_nano_has_no_idle_part(nano: Path) -> None:
    """Every matrix varies, and every id of the vocabulary has one token."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(nano)
    assert [name for name, weight in model.named_parameters() if weight.ndim > 1 and weight.std() == 0] == []
    assert sorted(AutoTokenizer.from_pretrained(nano).get_vocab().values()) == list(range(1024))


def test_nano_is_the_same_wherever_it_is_built(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "CHECKPOINTS", tmp_path)
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "VERSION").write_text("of an older builder")
    (tmp_path / ".nano-left-by-a-killed-build").mkdir()
    again = zoo.path("nano")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["nano"]
    assert weights_digest(again) == weights_digest(nano)
    for file in nano.iterdir():
        if file.name != "model.safetensors":
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    before = (again / "model.safetensors").stat().st_mtime_ns
    assert zoo.path("nano") == again and (again / "model.safetensors").stat().st_mtime_ns == before


def test_two_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock belongs to the open directory, so two threads meet it as two processes do."""
    monkeypatch.setattr(zoo, "CHECKPOINTS", tmp_path)
    with ThreadPoolExecutor(2) as builders:
        assert list(builders.map(zoo.path, ["nano", "nano"])) == [tmp_path / "nano"] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["nano"]
    assert load_file(tmp_path / "nano" / "model.safetensors")


def test_command_lists_and_names_directories(nano: Path, voice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = subprocess.run([sys.executable, "-m", "omni_lab.zoo"], capture_output=True, text=True, check=True)
    assert [line.split() for line in listed.stdout.splitlines()] == [["nano", str(nano)], ["voice", str(voice)]]
    assert main(["path", "voice"]) == 0
    assert capsys.readouterr().out == f"{voice}\n"
    assert main(["path", "opera"]) == 2
    assert capsys.readouterr() == ("", "checkpoint 'opera' is unknown; embedded checkpoints are: nano, voice\n")


def test_resolve(voice: Path, tmp_path: Path) -> None:
    assert zoo.resolve("voice") == zoo.resolve(str(voice)) == zoo.resolve(voice) == voice
    with pytest.raises(PipelineError, match="'/no/such' is no directory and no embedded one; those are: nano, voice"):
        zoo.resolve("/no/such")
    with pytest.raises(PipelineError, match="has no config"):
        zoo.resolve(tmp_path)


def test_bundled_set_is_what_the_voice_can_say(voice: Path) -> None:
    lines = zoo.bundled_set().read_text(encoding="utf-8").splitlines()
    assert len(lines) == 255
    assert all(re.fullmatch(r"rep_\d{3}\|\|\|\S.*", line) for line in lines)
    tokenizer = AutoTokenizer.from_pretrained(voice)
    assert all(
        tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in (line.split("|")[3] for line in lines)
    )
