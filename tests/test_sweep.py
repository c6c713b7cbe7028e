"""A sweep of rungs written in place, on the smallest checkpoint: order, ratios, console and report of a real run."""

from __future__ import annotations

import json
import math
import statistics
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import omni_lab
from omni_lab.metrics.relative import t_quantile
from omni_lab.run import main

SWEEP = """
name: small_ladder
model: {checkpoint: nano}
executor: inline
connector: in_process
optimizations: {graphs: {thinker: false, talker: false, code2wav: false}}
stages: {talker: {sampling: {temperature: 0.0, repetition_penalty: 1.0}}}
chunking: {initial_frames: 2, frames: 20, left_context: 5}
workload: {num_prompts: 2, concurrency: 2, warmup: 0, repeats: 3, output: {text_tokens: 4, codec_frames: 24}}
results: {save_audio: 0}
sweep:
  rungs:
    - {name: batch, optimizations: {async_chunk: false, async_output: false}}
    - {name: async_chunk, optimizations: {async_output: false}}
    - {name: async_output}
"""
RUNGS = ("batch", "async_chunk", "async_output")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> tuple[Path, str]:
    """The directory of a run, and what the command printed."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.yaml").write_text(SWEEP)
    with redirect_stdout(StringIO()) as printed:
        assert main([str(folder / "sweep.yaml"), "--quiet", "--out", str(folder / "run")]) == 0
    return folder / "run", printed.getvalue()


def test_every_other_repeat_ran_backwards(done: tuple[Path, str]) -> None:
    requests = omni_lab.load(done[0]).requests
    assert set(requests["codec_frames"]) == {24} and requests["error"].isna().all()
    first = requests.groupby(["repeat", "configuration"])["send_ns"].min().sort_values()
    order = [name for _, name in first.index]
    assert order == [*RUNGS, *RUNGS[::-1], *RUNGS]
    assert [repeat for repeat, _ in first.index] == [0] * 3 + [1] * 3 + [2] * 3


def test_ratios_are_those_of_the_single_repeats(done: tuple[Path, str]) -> None:
    cells = json.loads((done[0] / "run.json").read_text())["cells"]
    assert [(cell["configuration"], cell["concurrency"]) for cell in cells] == [(rung, 2) for rung in RUNGS]
    base, *others = cells
    for cell in others:
        logs = [
            math.log(cell_run["mean_audio_ttfp_ms"] / base_run["mean_audio_ttfp_ms"])
            for repeat in range(3)
            for cell_run in cell["runs"]
            for base_run in base["runs"]
            if cell_run["repeat"] == base_run["repeat"] == repeat
        ]
        reach = t_quantile(2) * statistics.stdev(logs) / math.sqrt(3)
        found = cell["relative"]["mean_audio_ttfp_ms"]
        assert found["ratio"] == pytest.approx(math.exp(statistics.fmean(logs)))
        assert found["high"] == pytest.approx(math.exp(statistics.fmean(logs) + reach))
        assert found["ratio"] < 1  # the first of three chunks comes before the whole answer, however noisy the machine
        assert cell["relative"]["stages.talker.gap_us_median"]["ratio"] > 0
    assert base["relative"] is None


def test_console_and_report_show_the_ladder(done: tuple[Path, str]) -> None:
    directory, printed = done
    assert "relative to batch" in printed and "95 % interval" in printed and "talker gap us" in printed
    found = omni_lab.load(directory).ratios
    assert set(found["configuration"]) == {"async_chunk", "async_output"}
    assert set(found["stage"].dropna()) == {"thinker", "talker", "code2wav"}
    html = (directory / "report.html").read_text("utf-8")
    assert "<h2>The ladder</h2>" in html and "Talker step gap" in html
