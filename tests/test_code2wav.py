"""Code2Wav against transformers' module, and the streaming window that every chunking relies on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_lab.models.qwen3_omni.code2wav import Code2Wav, window
from omni_lab.models.qwen3_omni.config import Code2WavConfig, parse_config
from omni_lab.models.qwen3_omni.weights import load_weights, read_config

FRAME, TAIL = 1920, 555
LENGTHS = (1, 2, 7, 25, 26, 100, 301, 660)


class Vocoder(NamedTuple):
    ours: Code2Wav
    theirs: torch.nn.Module
    tolerance: float
    codes: torch.Tensor
    full: torch.Tensor
    """Our decode of all 660 frames, the yardstick of prefixes and chunks."""


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# Random weights amplify rounding: shifting the order of a sum moves nano's samples by up to 1e-4, voice's by 1e-6.
@pytest.fixture(scope="module", params=[("voice", 1e-5), ("nano", 2e-4)], ids=lambda param: param[0])
def vocoder(request: pytest.FixtureRequest) -> Vocoder:
    name, tolerance = request.param
    directory: Path = request.getfixturevalue(name)
    config = read_config(directory)
    ours = load_ours(directory)
    theirs = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**config["code2wav_config"])).float().eval()
    theirs.load_state_dict(
        {
            name.removeprefix("code2wav."): tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
            if name.startswith("code2wav.")
        }
    )
    codes = random_codes(ours, 1, max(LENGTHS), seed=3)
    return Vocoder(ours, theirs, tolerance, codes, ours.decode(codes)[0])


def load_ours(directory: Path, dtype: torch.dtype = torch.float32) -> Code2Wav:
    network = Code2Wav(parse_config(read_config(directory)).code2wav, dtype, "cpu")
    assert load_weights(directory, network.slots(), ("code2wav.",)) > 0
    network.prepare()
    return network


def random_codes(network: Code2Wav, rows: int, frames: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, network.config.codebook_size, (rows, 16, frames), generator=generator)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def stream(network: Code2Wav, codes: torch.Tensor, chunks: list[int], context: int) -> torch.Tensor:
    """The waveform of codes [1, 16, T], decoded chunk by chunk."""
    parts, done = [], 0
    for new in chunks:
        cut = window(done, new, context, network.samples_per_frame, network.tail)
        parts.append(network.decode(codes[..., cut.start : cut.stop])[0, cut.samples])
        done += new
    return torch.cat(parts)


def chunk_sizes(frames: int, first: int, steady: int) -> list[int]:
    sizes = [min(first, frames)]
    while sum(sizes) < frames:
        sizes.append(min(steady, frames - sum(sizes)))
    return sizes


@pytest.mark.parametrize("frames", LENGTHS)
def test_equals_transformers(vocoder: Vocoder, frames: int) -> None:
    codes = vocoder.codes[..., :frames]
    wave = vocoder.full[None] if frames == max(LENGTHS) else vocoder.ours.decode(codes)
    assert wave.shape == (1, FRAME * frames - TAIL)
    assert wave.dtype == torch.float32
    assert distance(wave, vocoder.theirs(codes)[:, 0]) < vocoder.tolerance


def test_sizes_follow_from_the_config(vocoder: Vocoder) -> None:
    assert (vocoder.ours.samples_per_frame, vocoder.ours.tail) == (FRAME, TAIL)
    released = Code2WavConfig(
        codebook_size=2, quantizers=16, hidden_size=16, intermediate_size=16, layers=8, heads=2, kv_heads=2,
        head_dim=8, sliding_window=72, rms_norm_eps=1e-5, rope_theta=1e4, decoder_dim=16,
        upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2),
    )  # fmt: skip
    assert Code2Wav(released, torch.float32, "cpu").receptive_frames == 578


def test_prefix_of_frames_gives_prefix_of_samples(vocoder: Vocoder) -> None:
    for frames in (1, 4, 25, 77):
        wave = vocoder.ours.decode(vocoder.codes[..., :frames])[0]
        assert distance(wave, vocoder.full[: FRAME * frames - TAIL]) < vocoder.tolerance


def test_rows_of_a_padded_batch_do_not_touch_each_other(vocoder: Vocoder) -> None:
    lengths = [1, 4, 13, 29]
    rows = random_codes(vocoder.ours, len(lengths), max(lengths), seed=4)
    zeros, noise = torch.zeros_like(rows), random_codes(vocoder.ours, len(lengths), max(lengths), seed=5)
    for padding in (zeros, noise):
        padded = padding.clone()
        for row, length in enumerate(lengths):
            padded[row, :, :length] = rows[row, :, :length]
        waves = vocoder.ours.decode(padded)
        for row, length in enumerate(lengths):
            alone = vocoder.ours.decode(rows[row : row + 1, :, :length])[0]
            assert distance(waves[row, : FRAME * length - TAIL], alone) < vocoder.tolerance


def test_frames_of_zeros_are_frames(vocoder: Vocoder) -> None:
    codes = vocoder.codes[..., :12].clone()
    codes[..., 4:9] = 0
    codes[..., 11] = 0
    wave = vocoder.ours.decode(codes)
    assert wave.shape == (1, FRAME * 12 - TAIL)
    assert distance(wave, vocoder.theirs(codes)[:, 0]) < vocoder.tolerance


@pytest.mark.parametrize("context", [0, 1, 10, 25])
def test_windows_of_any_chunking_join_without_gap(context: int) -> None:
    for first in range(1, 10):
        for steady in range(1, 31):
            for frames in {1, steady - 1, steady, steady + 1, 3 * steady, first + 1, 660} - {0}:
                done = emitted = 0
                for new in chunk_sizes(frames, first, steady):
                    cut = window(done, new, context, FRAME, TAIL)
                    assert cut.stop == done + new
                    assert cut.start >= max(0, done - max(1, context))
                    assert cut.start * FRAME + cut.samples.start == emitted
                    assert cut.samples.stop == (cut.stop - cut.start) * FRAME - TAIL
                    done, emitted = cut.stop, cut.start * FRAME + cut.samples.stop
                assert emitted == FRAME * frames - TAIL


@pytest.mark.parametrize(
    ("frames", "first", "steady"),
    [(1, 4, 25), (24, 1, 25), (25, 4, 25), (26, 4, 25), (75, 9, 25), (17, 1, 1), (61, 3, 7)],
)
def test_stream_with_full_context_equals_the_full_decode(
    vocoder: Vocoder, frames: int, first: int, steady: int
) -> None:
    chunks = chunk_sizes(frames, first, steady)
    wave = stream(vocoder.ours, vocoder.codes[..., :frames], chunks, vocoder.ours.receptive_frames)
    assert wave.shape == (FRAME * frames - TAIL,)
    assert distance(wave, vocoder.full[: len(wave)]) < 1e-4 + vocoder.tolerance


def test_exact_context_is_exact_and_a_fifth_of_it_is_not(vocoder: Vocoder) -> None:
    """Behind a long past, the window with `receptive_frames` of it gives the full decode's samples."""
    network, done, new = vocoder.ours, 630, 5

    def difference(context: int) -> float:
        cut = window(done, new, context, FRAME, TAIL)
        wave = network.decode(vocoder.codes[..., cut.start : cut.stop])[0, cut.samples]
        return distance(wave, vocoder.full[FRAME * done - TAIL : FRAME * (done + new) - TAIL])

    assert difference(network.receptive_frames) < 1e-4 + vocoder.tolerance
    assert difference(network.receptive_frames // 5) > 1e-4 + vocoder.tolerance


def test_stream_with_25_frames_of_context_has_every_sample(vocoder: Vocoder, record_property: Any) -> None:
    frames = 180
    wave = stream(vocoder.ours, vocoder.codes[..., :frames], chunk_sizes(frames, 4, 25), 25)
    assert wave.shape == (FRAME * frames - TAIL,)
    record_property("max_deviation_from_full_decode", distance(wave, vocoder.full[: len(wave)]))


def test_lower_precision_gives_float32_of_the_right_length(voice: Path) -> None:
    network = load_ours(voice, torch.bfloat16)
    codes = random_codes(network, 2, 5, seed=6)
    wave = network.decode(codes)
    assert wave.dtype == torch.float32
    assert wave.shape == (2, FRAME * 5 - TAIL)
    exact = load_ours(voice).decode(codes)
    assert (wave - exact).std() < 0.3 * exact.std()
