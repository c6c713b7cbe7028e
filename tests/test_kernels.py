"""The hand-written kernels: what torch's own operators compute, in every shape, whatever the neighbours of a row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_lab.engine.kv_cache import KVCache
from omni_lab.engine.sampler import ResidualPick
from omni_lab.families.qwen3_omni.prefill_steps import packing
from omni_lab.kernels import library, ops
from omni_lab.models.qwen3_omni import fused
from omni_lab.models.qwen3_omni.code2wav_samples import DecoderUpsample, ResidualUnit, SnakeBeta, to_mono
from omni_lab.models.qwen3_omni.code_predictor import CodePredictor
from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.past import Past
from omni_lab.models.qwen3_omni.rotary import MultimodalRotation
from omni_lab.models.qwen3_omni.spans import PackedSpans, PiecewiseSpans, Span

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """Small random weights; the activations' frequencies and gains are exponentials of theirs."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for part in module.modules():
        if hasattr(part, "prepare"):
            part.prepare()
    return module


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() < TOLERANCE * expected.abs().max())


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("channels", "steps"), [(6, 1000), (7, 5), (16, 256), (48, 321)])
@torch.inference_mode()
def test_a_residual_unit_is_that_of_torch_and_keeps_each_rows_own_end(channels: int, steps: int, dilation: int) -> None:
    unit = filled(ResidualUnit(channels, dilation))
    signal, memory = torch.randn(3, channels, steps), torch.randn(3, channels * 6 * dilation)
    lengths = torch.tensor([steps, max(1, steps - 3), 1])
    past = Past(memory, steps, lengths)
    expected = unit(signal.clone(), past)
    first = unit.act1.turns, unit.act1.gain, unit.conv1.kernel, unit.conv1.bias
    second = unit.act2.turns, unit.act2.gain, unit.narrow, unit.conv2["conv"].bias
    actual, kept = ops.residual_unit(signal, memory.view(3, channels, -1), lengths, dilation, *first, *second)
    assert close(actual, expected) and close(kept.flatten(1), past.memory())


@pytest.mark.parametrize("begun", [True, False], ids=["going on", "beginning"])
@pytest.mark.parametrize(("inputs", "outputs", "rate", "steps"), [(12, 6, 3, 700), (96, 48, 8, 4), (10, 5, 5, 65)])
@torch.inference_mode()
def test_an_upsampling_convolution_is_that_of_torch(
    inputs: int, outputs: int, rate: int, steps: int, begun: bool
) -> None:
    snake, upsample = filled(SnakeBeta(inputs)), filled(DecoderUpsample(inputs, outputs, rate))
    signal, lengths = torch.randn(2, inputs, steps), torch.tensor([steps, 2])
    past = Past(torch.randn(2, inputs) if begun else None, steps, lengths)
    before = past.before_if_any(signal, 1)
    joined = snake(signal, before)
    past.keep(joined, 1)
    weights = snake.turns, snake.gain, upsample.kernel, upsample.kernel_bias
    actual, kept = ops.snake_convolution(signal, before.contiguous(), lengths, rate, *weights)
    assert close(actual, upsample(joined)) and close(kept.flatten(1), past.memory())


@torch.inference_mode()
def test_the_last_convolution_is_that_of_torch() -> None:
    snake, conv = filled(SnakeBeta(6)), filled(torch.nn.Conv1d(6, 1, 7))
    signal, before = torch.randn(2, 6, 999), torch.randn(2, 6, 6)
    kernel = conv.weight.permute(1, 2, 0).contiguous()
    lengths = torch.full((2,), 999)
    wave, kept = ops.snake_convolution(signal, before, lengths, 1, snake.turns, snake.gain, kernel, conv.bias)
    padded = snake(signal, before)
    assert close(wave[:, 0], to_mono(padded, conv)) and close(kept, padded[..., -6:])


@torch.inference_mode()
def test_a_snake_is_exact_far_from_zero() -> None:
    """The square of a sine repeats: a thousand turns away a float has four digits less, and no more is lost."""
    signal = torch.linspace(-3000, 3000, 6 * 512).view(1, 6, 512)
    one = torch.ones(6, 1)
    kernel = torch.eye(6)[:, None].contiguous()
    actual, _ = ops.snake_convolution(
        signal, torch.zeros(1, 6, 0), torch.tensor([512]), 1, one / torch.pi, one, kernel, torch.zeros(6)
    )
    expected = signal.double() + torch.sin(signal.double()).square()
    assert (actual - expected).abs().max() < 1e-3


PLAIN = DecoderConfig(
    vocab_size=50, hidden_size=48, intermediate_size=64, layers=3, heads=4, kv_heads=1, head_dim=16, rms_norm_eps=1e-6,
    rope_theta=1e4, mrope_section=(4, 2, 2), experts=6, experts_per_token=3, expert_size=32, norm_topk=False,
    dense_layers=frozenset({1}),
)  # fmt: skip
SHARED = DecoderConfig(
    vocab_size=50, hidden_size=192, intermediate_size=64, layers=2, heads=6, kv_heads=2, head_dim=48, rms_norm_eps=1e-6,
    rope_theta=1e6, mrope_section=None, experts=8, experts_per_token=2, expert_size=96, shared_expert_size=80,
)  # fmt: skip
LARGE_GROUP = dataclasses.replace(PLAIN, layers=2, heads=8, head_dim=128, mrope_section=(32, 16, 16))
NO_GROUP = dataclasses.replace(PLAIN, kv_heads=4)
STACKS = pytest.mark.parametrize(
    "config",
    [PLAIN, SHARED, LARGE_GROUP, NO_GROUP],
    ids=["dense and experts", "with a shared expert", "eight heads share a key", "no heads share a key"],
)


def random_weights(part: Decoder | CodePredictor) -> None:
    for slot in part.slots("").values():
        torch.nn.init.normal_(slot, 1.0 if slot.ndim == 1 else 0.0, 0.3 if slot.ndim == 1 else slot.shape[-1] ** -0.5)
    part.prepare()


def decoder_of(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config, torch.float32, "cpu")
    random_weights(decoder)
    return decoder


def cache_of(config: DecoderConfig, rows: int) -> KVCache:
    return KVCache(config.layers, rows, config.kv_heads, 200, config.head_dim)


@STACKS
@pytest.mark.parametrize("capture", [None, 0, 1, -1])
@torch.inference_mode()
def test_a_prefill_is_that_of_torch_whatever_the_neighbours(config: DecoderConfig, capture: int | None) -> None:
    decoder = decoder_of(config)
    capture = config.layers if capture == -1 else capture
    lengths = [31, 1, 16, 150]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(row, end - length, end) for row, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    x, positions = torch.randn(ends[-1], config.hidden_size), torch.randint(0, 90, (3, ends[-1])).float()
    x[:31] *= 5

    def fused_prefill(x: Tensor, positions: Tensor, spans: list[Span], cache: KVCache) -> tuple[Tensor, Tensor | None]:
        return fused.prefill(decoder, x, positions, PackedSpans(*packing(spans)), cache, capture)

    expected_cache, cache = cache_of(config, 4), cache_of(config, 4)
    expected, expected_states = decoder.prefill(x, positions, PiecewiseSpans(spans), expected_cache, capture)
    actual, states = fused_prefill(x, positions, spans, cache)
    assert close(actual, expected)
    assert (states is None and capture is None) or close(states, expected_states)
    assert all(close(ours, theirs) for ours, theirs in zip(cache.lines, expected_cache.lines, strict=True))
    for row, start, stop in spans:
        alone, _ = fused_prefill(x[start:stop], positions[:, start:stop], [(0, 0, stop - start)], cache_of(config, 1))
        assert torch.equal(alone[0], actual[row])


@STACKS
@pytest.mark.parametrize("rows", [1, 2, 70])
@torch.inference_mode()
def test_a_decode_step_is_that_of_torch_whatever_the_neighbours(config: DecoderConfig, rows: int) -> None:
    decoder = decoder_of(config)
    expected_cache = cache_of(config, rows)
    for lines in expected_cache.lines:
        lines.normal_()
    cache = expected_cache.over([lines.clone() for lines in expected_cache.lines])
    before = [lines.clone() for lines in cache.lines]
    x, lengths = torch.randn(rows, config.hidden_size), torch.randint(0, 190, (rows,))
    lengths[:2] = torch.tensor([0, 17])[:rows]
    positions = lengths.float() + 3
    expected = decoder.decode(x, positions, lengths, expected_cache, int(lengths.max()) + 1)
    actual = fused.decode(decoder, x, positions, lengths, cache)
    assert close(actual, expected)
    assert all(close(ours, theirs) for ours, theirs in zip(cache.lines, expected_cache.lines, strict=True))
    alone = fused.decode(decoder, x[:1], positions[:1], lengths[:1], cache.over(before))
    assert torch.equal(alone[0], actual[0])


@pytest.mark.parametrize("config", [PLAIN, SHARED], ids=["dense and experts", "with a shared expert"])
@torch.inference_mode()
def test_gates_may_be_far_from_zero(config: DecoderConfig) -> None:
    decoder = decoder_of(config)
    for layer in decoder.layers:
        layer.mlp_norm.scale *= 100
    x, lengths = torch.randn(5, config.hidden_size), torch.zeros(5, dtype=torch.int64)
    expected = decoder.decode(x, lengths.float(), lengths, cache_of(config, 5), 1)
    assert close(fused.decode(decoder, x, lengths.float(), lengths, cache_of(config, 5)), expected)


@torch.inference_mode()
def test_three_axes_turn_a_step_as_torch_does() -> None:
    decoder = Decoder(PLAIN, torch.float32, "cpu", MultimodalRotation)
    random_weights(decoder)
    x, lengths, positions = torch.randn(5, 48), torch.zeros(5, dtype=torch.int64), torch.randint(0, 50, (5, 3)).float()
    expected = decoder.decode(x, positions, lengths, cache_of(PLAIN, 5), 1)
    assert close(fused.decode(decoder, x, positions, lengths, cache_of(PLAIN, 5)), expected)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("who", ["greedy", "mixed", "drawn"])
@torch.inference_mode()
def test_residual_codes_are_those_of_torch(who: str, rows: int) -> None:
    config = dataclasses.replace(PLAIN, vocab_size=72, experts=0, mrope_section=None, dense_layers=frozenset())
    predictor = CodePredictor(config, 16, torch.float32, "cpu")
    random_weights(predictor)
    uniforms = torch.rand(rows, 16, dtype=torch.float64)
    pick = {
        "greedy": ResidualPick(50, 0.8),
        "mixed": ResidualPick(50, 0.8, uniforms, torch.arange(rows) % 2 == 0),
        "drawn": ResidualPick(50, 0.8, uniforms),
    }[who]
    hidden, embed0 = torch.randn(2, rows, config.hidden_size)
    expected, expected_sum = predictor.predict(hidden, embed0, pick)
    codes, embeds = fused.predict(predictor, hidden, embed0, pick)
    assert torch.equal(codes, expected) and close(embeds, expected_sum)
    first = ResidualPick(50, 0.8, uniforms[:1] if who == "drawn" else None)  # a mixed batch begins with a greedy row
    alone, _ = fused.predict(predictor, hidden[:1], embed0[:1], first)
    assert torch.equal(alone[0], codes[0])


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.8), (1, 0.8), (500, 0.999), (5, 0.01)])
@torch.inference_mode()
def test_a_draw_is_that_of_torch(top_k: int, top_p: float) -> None:
    config = dataclasses.replace(
        PLAIN, vocab_size=256, layers=1, experts=0, mrope_section=None, dense_layers=frozenset()
    )
    predictor = CodePredictor(config, 2, torch.float32, "cpu")
    random_weights(predictor)
    hidden, embed0 = torch.randn(2, 500, config.hidden_size)
    uniforms = torch.rand(500, 2, dtype=torch.float64)
    uniforms[:2] = torch.tensor([[0.0], [1 - 1e-16]])
    pick = ResidualPick(top_k, top_p, uniforms)
    assert torch.equal(fused.predict(predictor, hidden, embed0, pick)[0], predictor.predict(hidden, embed0, pick)[0])


def test_odd_widths_go_another_way() -> None:
    config = dataclasses.replace(PLAIN, expert_size=24)
    assert not fused.fits(Decoder(config, torch.float32, "cpu"))
    assert not fused.fits(Decoder(PLAIN, torch.bfloat16, "cpu"))
    assert fused.fits(Decoder(PLAIN, torch.float32, "cpu"))


def test_a_kernel_refuses_what_it_cannot_read(capfd: pytest.CaptureFixture[str]) -> None:
    heads, starts = torch.zeros(3, 3, 16), torch.zeros(3, dtype=torch.int64)
    wrongs = (
        (heads.mT.contiguous().mT, "is not contiguous"),
        (heads.double(), "numbers of another type"),
        (torch.zeros(3, 3, 20), "no multiple of a vector"),
    )
    for wrong, cause in wrongs:
        with pytest.raises(RuntimeError, match="the kernel span_attention refuses its arguments"):
            ops.span_attention(wrong, 1, starts)
        assert cause in capfd.readouterr().err


def test_kernels_are_compiled_once_and_a_failure_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_LAB_CACHE", str(tmp_path))
    library.open_kernels.cache_clear()
    library.open_kernels()
    (compiled,) = tmp_path.glob("kernels/*.so")
    made = compiled.stat().st_mtime_ns
    library.open_kernels.cache_clear()
    library.open_kernels()
    assert compiled.stat().st_mtime_ns == made
    library.open_kernels.cache_clear()
    damaged = tmp_path / "other" / "kernels" / compiled.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("OMNI_LAB_CACHE", str(tmp_path / "other"))
    with pytest.raises(library.KernelsMissing, match=r"cannot be opened \(.*\); delete it"):
        library.open_kernels()
    damaged.unlink()
    monkeypatch.setattr(library, "FLAGS", ("--no-such-flag",))
    with pytest.raises(library.KernelsMissing, match=r"cannot compile the kernels: .*no-such-flag"):
        library.open_kernels()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(library.KernelsMissing, match="there is no C"):
        library.open_kernels()
