"""The roofline: its counts against what PyTorch counts in the networks themselves, and the command on real steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from omni_lab.engine.kv_cache import KVCache
from omni_lab.models.qwen3_omni.code2wav import Code2Wav
from omni_lab.models.qwen3_omni.config import OmniConfig, parse_config
from omni_lab.models.qwen3_omni.talker import Talker
from omni_lab.models.qwen3_omni.thinker import Thinker
from omni_lab.models.qwen3_omni.weights import load_weights, read_config
from omni_lab.models.qwen3_omni.work import code2wav_frames, talker_frame, thinker_step
from omni_lab.roofline import main, matrix_rate, read_rate

ROWS, CONTEXT = 64, 63


@pytest.fixture(scope="module", params=["nano", "voice"])
def checkpoint(request: pytest.FixtureRequest) -> tuple[Path, OmniConfig]:
    directory = request.getfixturevalue(request.param)
    return directory, parse_config(read_config(directory))


def counted_macs(call) -> float:
    """Multiply-accumulates of the matrix products that run, those included that PyTorch's counter does not know."""

    def grouped(rows, experts, *_, **__) -> int:
        return 2 * rows[0] * experts[1] * experts[2]

    def added(_, left, right, *__, **___) -> int:
        return 2 * left[0] * left[1] * left[2] * right[2]

    unknown = {torch.ops.aten._grouped_mm: grouped, torch.ops.aten.baddbmm_: added}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=unknown) as seen:
        call()
    return seen.get_total_flops() / 2


def cache_of(text) -> KVCache:
    return KVCache(text.layers, ROWS, text.kv_heads, 128, text.head_dim)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.arange(ROWS) % 50
    return tokens, torch.full((ROWS,), float(CONTEXT)), torch.full((ROWS,), CONTEXT)


def test_work_of_a_thinker_step(checkpoint: tuple[Path, OmniConfig]) -> None:
    directory, config = checkpoint
    text = config.thinker.text
    network = Thinker(text, torch.float32)
    load_weights(directory, network.slots(), ())
    network.prepare()
    tokens, positions, lengths = inputs()
    macs = counted_macs(lambda: network.decode(tokens, positions, lengths, cache_of(text), CONTEXT + 1))
    work = thinker_step(text, ROWS, CONTEXT)
    assert 1 <= macs / work.macs < 1.06  # rotations are products too, and groups of experts are filled up


def test_work_of_a_talker_frame(checkpoint: tuple[Path, OmniConfig]) -> None:
    directory, config = checkpoint
    thinker, text = config.thinker.text, config.talker.text
    network = Talker(config.talker, thinker.hidden_size, thinker.vocab_size, torch.float32)
    load_weights(directory, network.slots(), ())
    network.prepare()
    tokens, positions, lengths = inputs()
    hidden = torch.zeros(ROWS, text.hidden_size)

    def frame() -> None:
        cache = cache_of(text)
        network.frame(
            hidden, tokens, hidden, positions, lengths, cache, CONTEXT + 1, lambda scores, _: scores.argmax(-1)
        )

    assert 1 <= counted_macs(frame) / talker_frame(config.talker, ROWS, CONTEXT).macs < 1.06


def test_work_of_frames_to_samples(checkpoint: tuple[Path, OmniConfig]) -> None:
    """As many frames as attention sees at most, twice: the difference has no beginning and no end in it."""
    _, config = checkpoint
    network = Code2Wav(config.code2wav, torch.float32, "cpu")
    network.prepare()
    window = config.code2wav.sliding_window
    quantizers = config.code2wav.quantizers
    short, long = (
        counted_macs(lambda frames=frames: network.decode(torch.zeros(1, quantizers, frames, dtype=torch.int64)))
        for frames in (window, 2 * window)
    )
    expected = code2wav_frames(config.code2wav, window)
    layers = config.code2wav.layers * 2 * config.code2wav.heads * config.code2wav.head_dim
    beyond = layers * ((2 * window) ** 2 - window**2 - window**2)  # masked scores, which are computed all the same
    assert long - short - beyond == pytest.approx(expected.macs, rel=0.02)


def test_reading_grows_with_rows_only_by_experts_and_cache(checkpoint: tuple[Path, OmniConfig]) -> None:
    text = checkpoint[1].thinker.text
    one, many = thinker_step(text, 1, 0), thinker_step(text, 1000, 0)
    experts = text.layers * (text.experts - text.experts_per_token) * 3 * text.hidden_size * text.expert_size
    assert many.macs == pytest.approx(1000 * one.macs)
    assert many.numbers - one.numbers == pytest.approx(experts)
    cached = thinker_step(text, 1, 10).numbers - one.numbers
    assert cached == 10 * text.layers * 2 * text.kv_heads * text.head_dim


def test_rates_are_those_of_a_processor() -> None:
    assert 1e8 < matrix_rate() < 1e14
    assert 1e8 < read_rate(1e6) < 1e14


def test_the_command_sets_floors_under_real_steps(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(nano), "--eager", "--in-flight", "2", "--stages", "talker", "code2wav", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in found["floors"]] == ["talker", "code2wav"]
    talker = found["floors"][0]
    assert talker["in_flight"] == 2 and 1 <= talker["mean_batch"] <= 2 and talker["steps"] >= 50
    for one in found["floors"]:
        assert 0 < one["floor_ms"] < one["step_ms"]
        assert one["share"] == pytest.approx(one["floor_ms"] / one["step_ms"])


@pytest.mark.parametrize(
    "arguments", [["gone"], ["--in-flight", "0"], ["--in-flight", "2", "2"], ["--stages", "talkr"]], ids=" ".join
)
def test_a_wrong_option_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and arguments[-1] in err
