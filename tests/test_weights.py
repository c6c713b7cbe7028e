"""Reading checkpoint directories: config.json, and tensors into existing memory without a second copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omni_lab.core import PipelineError
from omni_lab.models.qwen3_omni.config import parse_config
from omni_lab.models.qwen3_omni.talker import Talker
from omni_lab.models.qwen3_omni.thinker import Thinker
from omni_lab.models.qwen3_omni.weights import load_weights, read_config

TENSORS = {"a.one": torch.arange(6.0).view(2, 3), "a.two": torch.arange(4.0), "b.other": torch.ones(5)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def empty_slots() -> dict[str, torch.Tensor]:
    return {name: torch.full(TENSORS[name].shape, -1.0) for name in ("a.one", "a.two")}


def shard(directory: Path) -> None:
    """Rewrite a single-file checkpoint as two shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    names, placed = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, directory / file)
        placed |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (directory / "model.safetensors").unlink()


def test_values_dtype_and_views(single: Path) -> None:
    fused = torch.zeros(4, 3, dtype=torch.float64)
    slots = {"a.one": fused[1:3], "a.two": torch.zeros(4, dtype=torch.bfloat16)}
    assert load_weights(single, slots, ("a.",)) == 10 * 4
    assert torch.equal(fused, torch.tensor([[0.0] * 3, [0, 1, 2], [3, 4, 5], [0] * 3], dtype=torch.float64))
    assert slots["a.two"].tolist() == [0, 1, 2, 3]


def test_sharded_equals_single(single: Path) -> None:
    whole, parts = empty_slots(), empty_slots()
    load_weights(single, whole, ("a.",))
    shard(single)
    load_weights(single, parts, ("a.",))
    assert all(torch.equal(whole[name], parts[name]) and torch.equal(whole[name], TENSORS[name]) for name in whole)


def test_missing_tensor_is_named_and_nothing_is_copied(single: Path) -> None:
    slots = empty_slots() | {"a.absent": torch.zeros(1)}
    with pytest.raises(PipelineError, match=r"model\.safetensors.*a\.absent is missing"):
        load_weights(single, slots, ("a.",))
    assert (slots["a.one"] == -1).all()


def test_extra_tensor_is_named_only_under_the_prefix(single: Path) -> None:
    slots = {"a.one": torch.zeros(2, 3)}
    with pytest.raises(PipelineError, match=r"a\.two is not part of the network"):
        load_weights(single, slots, ("a.",))
    load_weights(single, slots, ("c.",))


def test_misshapen_tensor_shows_both_shapes(single: Path) -> None:
    slots = empty_slots() | {"a.one": torch.zeros(3, 2)}
    with pytest.raises(PipelineError, match=r"model\.safetensors: a\.one has shape \(2, 3\).*\(3, 2\)"):
        load_weights(single, slots, ("a.",))


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def garble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def lose_shard(directory: Path) -> None:
    shard(directory)
    (directory / "model-00001-of-00002.safetensors").unlink()


def break_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{")


def empty_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model\.safetensors: cannot be read"),
        (garble, r"model\.safetensors: cannot be read"),
        (lambda directory: (directory / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
        (lose_shard, r"model-00001-of-00002\.safetensors: no such file"),
        (break_index, r"index\.json: cannot be read as JSON"),
        (empty_index, r"index\.json: weight_map must map"),
    ],
)
def test_damaged_files_are_named(single: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(single)
    with pytest.raises(PipelineError, match=message):
        load_weights(single, empty_slots(), ("a.",))


def test_whole_checkpoint_has_a_slot_for_every_text_tensor(nano: Path) -> None:
    config = parse_config(read_config(nano))
    text = config.thinker.text
    slots = Thinker(text, torch.float32).slots()
    slots |= Talker(config.talker, text.hidden_size, text.vocab_size, torch.float32).slots()
    with safe_open(nano / "model.safetensors", "pt") as tensors:
        names = {name for name in tensors.keys() if name.startswith(("thinker.model.", "thinker.lm_head", "talker."))}  # noqa: SIM118
    assert names == set(slots)


def test_config_reads_published_and_saved_forms(nano: Path, voice: Path) -> None:
    values = read_config(nano)
    config = parse_config(values)
    text = values["thinker_config"]["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"mrope_section": rope["mrope_section"], "rope_type": "default", "interleaved": True}
    assert parse_config(values) == config
    assert config.talker.text.experts == 8 and config.talker.text.shared_expert_size == 96
    newline = parse_config(read_config(voice)).talker.newline
    assert newline == json.loads((voice / "vocab.json").read_text())["\u010a"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "qwen2", "model_type is 'qwen2'"),
        ("talker_config", None, "talker_config must be an object"),
        ("thinker_config.text_config.hidden_size", None, "thinker_config.text_config.hidden_size must be a number"),
        ("thinker_config.text_config.hidden_size", "192", "thinker_config.text_config.hidden_size must be a number"),
        ("thinker_config.text_config.hidden_act", "gelu", "thinker_config.text_config.hidden_act is 'gelu'"),
        ("thinker_config.text_config.head_dim", 64, "mrope_section"),
        ("thinker_config.text_config.rope_parameters.rope_type", "yarn", "rope_type 'yarn'"),
        ("talker_config.speaker_id", {}, "talker_config.speaker_id must map"),
        ("code2wav_config.upsample_rates", [8, "5"], "code2wav_config.upsample_rates must be a list"),
    ],
)
def test_config_errors_name_the_key(nano: Path, tmp_path: Path, path: str, value: object, message: str) -> None:
    values = json.loads((nano / "config.json").read_text())
    *parents, key = path.split(".")
    part = values
    for parent in parents:
        part = part[parent]
    part[key] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PipelineError, match=message):
        parse_config(read_config(tmp_path))


def test_config_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(PipelineError, match="must hold one JSON object"):
        read_config(tmp_path)


LOADER = """
import json, sys
from pathlib import Path
import torch
from omni_lab.models.qwen3_omni.config import parse_config
from omni_lab.models.qwen3_omni.thinker import Thinker
from omni_lab.models.qwen3_omni.weights import load_weights, read_config
directory = Path(sys.argv[1])
network = Thinker(parse_config(read_config(directory)).thinker.text, torch.float32)
count = load_weights(directory, network.slots(), ("thinker.model.", "thinker.lm_head"))
network.prepare()
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"weights": count, "peak": int(peak) * 1024, "transformers": "transformers" in sys.modules}))
"""


def test_loading_never_holds_a_second_copy(nano: Path, tmp_path: Path) -> None:
    """Peak memory of a process that loads one stage of 450 MB stays below 1.25 times its weights + 300 MB."""
    values = json.loads((nano / "config.json").read_text())
    values["thinker_config"]["text_config"] |= {
        "vocab_size": 30000,
        "hidden_size": 1024,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shutil.copy(nano / "tokenizer.json", tmp_path)
    with torch.device("meta"):
        slots = Thinker(parse_config(values).thinker.text, torch.float32, "meta").slots()
    write_sparse(tmp_path / "model.safetensors", {name: tuple(slot.shape) for name, slot in slots.items()})
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    report = json.loads(result.stdout)
    assert report["weights"] == (tmp_path / "model.safetensors").stat().st_size - header_size(tmp_path)
    assert report["weights"] > 400e6
    assert report["peak"] > report["weights"]
    assert report["peak"] <= 1.25 * report["weights"] + 300e6
    assert not report["transformers"]


def write_sparse(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A float32 safetensors file of zeros that takes no room on disk."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        output.truncate(8 + len(text) + offset)


def header_size(directory: Path) -> int:
    with (directory / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
