"""Traces of programs that know nothing of omni_lab: torch loops and transformers' `generate`, recorded here and now."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import AutoModelForCausalLM, Qwen3Config

from omni_lab.tracing.gaps import analyse

PAUSE_S = 0.004
STEPS = 20


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def infer(network: nn.Module, after: Callable[[], object]) -> None:
    with torch.no_grad():
        for _ in range(STEPS):
            network(torch.randn(32, 64)).argmax(-1).tolist()
            after()


def train(network: nn.Module, after: Callable[[], object]) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(STEPS):
        batch = torch.randn(32, 64)
        loss = ((network(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()


@pytest.mark.parametrize("loop", [infer, train])
@pytest.mark.parametrize("stacks", [False, True])
def test_a_loop_without_marks(loop: Callable, stacks: bool, network: nn.Module, tmp_path: Path) -> None:
    """Each turn ends with a pause, and every gap is at least as long as its own."""
    pauses = []

    def pause() -> None:
        begin = time.perf_counter()
        time.sleep(PAUSE_S)
        pauses.append((time.perf_counter() - begin) * 1e6)

    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks) as recorded:
        loop(network, pause)
    recorded.export_chrome_trace(str(tmp_path / "loop.json.gz"))
    analysis = analyse(tmp_path / "loop.json.gz")
    worker = analysis.workers.iloc[0]
    assert worker.status == "ok" and worker.steps == STEPS, worker.reason
    assert "inferred from the host's outermost ranges" in worker.found
    assert (analysis.gaps.gap_us >= pauses[:-1]).all()
    if stacks:
        assert analysis.causes.cause[0] == "<built-in function sleep>" and analysis.causes.share[0] > 0.5


@pytest.mark.parametrize("pause_s", [0.0, PAUSE_S])
def test_a_loop_with_profiler_steps(pause_s: float, network: nn.Module, tmp_path: Path) -> None:
    """ProfilerStep spans the pause too; it is a gap all the same."""
    pauses = []

    def pause_and_step() -> None:
        begin = time.perf_counter()
        time.sleep(pause_s)
        pauses.append((time.perf_counter() - begin) * 1e6)
        recorded.step()

    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=10, repeat=1)
    ) as recorded:
        infer(network, pause_and_step)
    recorded.export_chrome_trace(str(tmp_path / "loop.json"))
    analysis = analyse(tmp_path / "loop.json")
    worker = analysis.workers.iloc[0]
    assert worker.status == "ok" and worker.steps == 10 and "(torch.profiler)" in worker.found, worker.reason
    assert analysis.gaps.step.tolist() == list(range(3, 12))
    assert (analysis.gaps.gap_us >= pauses[2:11]).all()
    assert analysis.causes.cause[0] == "(nothing recorded)"


def test_generate_of_transformers(tmp_path: Path) -> None:
    """One step a token, though the first reads the prompt: layers and heads are not taken for steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=512, **sizes, **heads)).eval()
    tokens = torch.randint(5, 500, (2, 9))
    assert 0 < generated(model, tokens, 16, tmp_path).idle_share < 0.5


def test_generate_of_the_omni_checkpoint(nano: Path, tmp_path: Path) -> None:
    """A mixture of experts: no two steps have the same operators."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(nano, dtype=torch.float32).eval().thinker
    tokens = torch.arange(20, 31)[None]
    generated(model, tokens, 12, tmp_path)


def generated(model: torch.nn.Module, tokens: torch.Tensor, count: int, folder: Path) -> pd.Series:
    """The worker in the trace of a `generate` of `count` tokens, which has as many steps."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    recorded.export_chrome_trace(str(folder / "generate.json.gz"))
    worker = analyse(folder / "generate.json.gz").workers.iloc[0]
    assert worker.status == "ok" and worker.steps == count, (worker.reason, worker.found)
    return worker
