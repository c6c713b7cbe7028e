"""The Thinker's audio and vision encoders against transformers' modules, over packed inputs of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)

from omni_lab.models.qwen3_omni.audio_tower import AudioTower, audio_tokens
from omni_lab.models.qwen3_omni.config import parse_config
from omni_lab.models.qwen3_omni.vision_tower import VisionTower
from omni_lab.models.qwen3_omni.weights import load_weights, read_config

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def theirs(directory: Path, network: torch.nn.Module, prefix: str) -> torch.nn.Module:
    weights = load_file(directory / "model.safetensors")
    network.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    return network.float().eval()


@pytest.fixture(scope="module", params=["nano", "voice"])
def audio(request: pytest.FixtureRequest) -> tuple[AudioTower, torch.nn.Module]:
    directory: Path = request.getfixturevalue(request.param)
    config = read_config(directory)
    ours = AudioTower(parse_config(config).thinker.audio)
    load_weights(directory, ours.slots(), ("thinker.audio_tower.",))
    encoder = Qwen3OmniMoeAudioEncoderConfig(**config["thinker_config"]["audio_config"])
    network = reference.Qwen3OmniMoeAudioEncoder._from_config(encoder)
    return ours, theirs(directory, network, "thinker.audio_tower.")


@pytest.fixture(scope="module", params=["nano", "voice"])
def vision(request: pytest.FixtureRequest) -> tuple[VisionTower, torch.nn.Module]:
    directory: Path = request.getfixturevalue(request.param)
    config = read_config(directory)
    ours = VisionTower(parse_config(config).thinker.vision)
    load_weights(directory, ours.slots(), ("thinker.visual.",))
    encoder = Qwen3OmniMoeVisionEncoderConfig(**config["thinker_config"]["vision_config"])
    network = reference.Qwen3OmniMoeVisionEncoder._from_config(encoder)
    return ours, theirs(directory, network, "thinker.visual.")


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize(
    "lengths",
    [[1], [8], [9], [50], [99], [100], [101], [250], [800], [1000], [1, 8], [30, 99], [250, 7, 900], [800, 801, 100]],
    ids=str,
)
def test_audio_equals_transformers(audio: tuple[AudioTower, Any], lengths: list[int]) -> None:
    ours, encoder = audio
    features, counts = noise(128, sum(lengths)), torch.tensor(lengths)
    tokens = ours(features, counts)
    assert tokens.shape == (sum(audio_tokens(length) for length in lengths), ours.config.output_size)
    torch.testing.assert_close(tokens, encoder(features, counts).last_hidden_state, atol=TOLERANCE, rtol=TOLERANCE)


def test_audio_token_counts_are_transformers() -> None:
    lengths = torch.arange(1, 3201)
    expected = reference._get_feat_extract_output_lengths(lengths).tolist()
    assert [audio_tokens(length) for length in lengths.tolist()] == expected
    assert audio_tokens(3000) == 390


def test_recordings_of_a_second_or_more_do_not_touch_each_other(audio: tuple[AudioTower, Any]) -> None:
    ours, _ = audio
    lengths = [250, 100, 901]
    features = noise(128, sum(lengths))
    together = ours(features, torch.tensor(lengths))
    alone = [ours(part, torch.tensor([part.shape[1]])) for part in features.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone), atol=TOLERANCE, rtol=TOLERANCE)


def test_long_audio_is_convolved_in_parts(audio: tuple[AudioTower, Any]) -> None:
    ours, encoder = audio
    features, counts = noise(128, 7050), torch.tensor([7050])
    expected = encoder(features, counts).last_hidden_state
    torch.testing.assert_close(ours(features, counts), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("lengths", [[40, 61], [0, 100], []])
def test_audio_lengths_that_do_not_fit_are_refused(audio: tuple[AudioTower, Any], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="audio lengths"):
        audio[0](noise(128, 100), torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize(
    "grid",
    [
        [[1, 2, 2]],
        [[1, 6, 8]],
        [[1, 8, 6]],
        [[1, 2, 14]],
        [[1, 20, 22]],
        [[2, 8, 8]],
        [[3, 4, 6]],
        [[1, 6, 8], [1, 6, 8], [1, 4, 10]],
        [[2, 4, 4], [1, 8, 8], [3, 4, 4]],
    ],
    ids=str,
)
def test_vision_equals_transformers(vision: tuple[VisionTower, Any], grid: list[list[int]]) -> None:
    ours, encoder = vision
    shapes = torch.tensor(grid)
    pixels = noise(int(shapes.prod(1).sum()), 3 * 2 * 16 * 16)
    tokens, deepstack = ours(pixels, shapes)
    assert tokens.shape == (len(pixels) // 4, ours.config.output_size)
    expected = encoder(pixels, shapes)
    torch.testing.assert_close(tokens, expected.pooler_output, atol=TOLERANCE, rtol=TOLERANCE)
    assert len(deepstack) == len(expected.deepstack_features) == len(ours.config.deepstack_layers)
    for mine, other in zip(deepstack, expected.deepstack_features, strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=TOLERANCE)


def test_images_of_one_call_do_not_touch_each_other(vision: tuple[VisionTower, Any]) -> None:
    ours, _ = vision
    grid = torch.tensor([[1, 6, 8], [2, 4, 4], [1, 6, 8]])
    pixels = noise(int(grid.prod(1).sum()), 1536)
    together, _ = ours(pixels, grid)
    parts = pixels.split(grid.prod(1).tolist())
    alone = [ours(part, shape[None])[0] for part, shape in zip(parts, grid, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("grid", [[[1, 6, 7]], [[1, 6, 6]], [[1, 3, 16]]])
def test_grids_that_do_not_fit_are_refused(vision: tuple[VisionTower, Any], grid: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="image grid"):
        vision[0](noise(48, 1536), torch.tensor(grid))


def test_towers_run_in_lower_precision(voice: Path) -> None:
    config = parse_config(read_config(voice)).thinker
    audio_tower = AudioTower(config.audio, torch.bfloat16)
    vision_tower = VisionTower(config.vision, torch.bfloat16)
    load_weights(voice, audio_tower.slots(), ("thinker.audio_tower.",))
    load_weights(voice, vision_tower.slots(), ("thinker.visual.",))
    assert audio_tower(noise(128, 250), torch.tensor([250])).dtype == torch.bfloat16
    tokens, deepstack = vision_tower(noise(48, 1536), torch.tensor([[1, 6, 8]]))
    assert {tensor.dtype for tensor in (tokens, *deepstack)} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in (tokens, *deepstack))
