"""The hand-written kernels: what torch's own operators compute, in every shape, whatever the neighbours of a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_lab.engine.kv_cache import KVCache
from omni_lab.kernels import library, ops
from omni_lab.models.qwen3_omni import mlp
from omni_lab.models.qwen3_omni.code2wav_samples import DecoderUpsample, ResidualUnit, SnakeBeta, to_mono
from omni_lab.models.qwen3_omni.past import Past
from omni_lab.models.qwen3_omni.spans import PiecewiseSpans

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


@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "top_k"), [(1, 192, 96, 8, 2), (67, 64, 16, 5, 3)])
@torch.inference_mode()
def test_experts_are_those_of_torch_whatever_the_batch(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int
) -> None:
    x, residual = torch.randn(2, tokens, hidden)
    x[0] *= 100  # gates far from zero
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    weights = torch.softmax(torch.randn(tokens, top_k), 1)
    gate_up, down = torch.randn(experts, hidden, 2 * inner) / 8, torch.randn(experts, inner, hidden) / 4
    actual = ops.experts(x, residual, weights, chosen, gate_up, down)
    assert close(actual, mlp.grouped(x, residual, weights, chosen, gate_up, down))
    for token in (0, tokens // 2, tokens - 1):
        own = slice(token, token + 1)
        alone = ops.experts(x[own], residual[own], weights[own], chosen[own], gate_up, down)
        assert torch.equal(alone, actual[own])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 32), (4, 4, 16), (8, 1, 128)])
@torch.inference_mode()
def test_attention_of_packed_prompts_is_that_of_torch_whatever_the_neighbours(
    heads: int, kv_heads: int, size: int
) -> None:
    lengths = [31, 1, 16, 150]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(row, end - length, end) for row, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    qk, value = torch.randn(ends[-1], heads + kv_heads, size), torch.randn(ends[-1], kv_heads, size)
    qk[:31] *= 5  # weights that are all but 0 and 1
    starts = torch.cat([torch.full((stop - start,), start) for _, start, stop in spans])
    actual = ops.span_attention(qk, value, starts)
    cache = KVCache(1, len(spans), kv_heads, 160, size)
    assert close(actual, PiecewiseSpans(spans).attend(qk, value, cache, 0))
    for _, start, stop in spans:
        own = slice(start, stop)
        assert torch.equal(
            ops.span_attention(qk[own], value[own], torch.zeros(stop - start, dtype=torch.int64)), actual[own]
        )


def test_a_kernel_refuses_what_it_cannot_read(capfd: pytest.CaptureFixture[str]) -> None:
    qk, value, starts = torch.zeros(3, 2, 16), torch.zeros(3, 1, 16), torch.zeros(3, dtype=torch.int64)
    for wrong, cause in ((qk.mT.contiguous().mT, "is not contiguous"), (qk.double(), "numbers of another type")):
        with pytest.raises(RuntimeError, match="the kernel span_attention refuses its arguments"):
            ops.span_attention(wrong, value, starts)
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
