"""`python -m omni_lab.gaps` and the comparison of two traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from omni_lab import gaps
from omni_lab.tracing.compare import changed
from tests.synthetic_traces import Program, decoder

KEYS = ["name", "status", "reason", "steps", "step_ms_median", "gap_us_median", "gap_us_p95", "gap_us_p99"]
KEYS += ["busy_share", "idle_share", "causes"]


def noisy(gap_us: float, seed: int, steps: int = 300) -> Program:
    """Gaps that drift slowly, as those of a program do: each depends on the one before."""
    random, program, at, drift = np.random.default_rng(seed), Program(name="talker_r0"), 0, 0.0
    for _ in range(steps):
        drift = 0.8 * drift + random.normal(0, 0.1)
        program.step(at, at + 90, batch=4)
        program.launch(at + 1, at + 5, at + 505)
        at += 505 + round(gap_us * np.exp(drift))
    return program


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    assert gaps.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_keys_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder().write(tmp_path / "a.json")
    decoder(1).write(tmp_path / "b.json")
    result = printed(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert list(result) == ["workers"]
    good, bad = result["workers"]
    assert list(good) == list(bad) == KEYS
    assert good["status"] == "ok" and "markers" in good["reason"] and good["gap_us_median"] == pytest.approx(300)
    assert sum(good["causes"].values()) == pytest.approx(1)
    assert bad["status"] == "incomplete" and bad["idle_share"] is None and bad["causes"] == {}


def test_the_table_says_how_steps_were_found_and_what_filled_the_gaps(tmp_path: Path) -> None:
    path = decoder().write(tmp_path / "talker.json.gz")
    done = subprocess.run([sys.executable, "-m", "omni_lab.gaps", path], capture_output=True, text=True, check=True)
    for text in ("talker: ok, markers: 'step 0 decode batch=1 tokens=1'", "detokenize", "(nothing recorded)", "batch"):
        assert text in done.stdout
    assert "reading" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{}/nothing.json"], "nothing.json: expected a trace file or a directory"),
        (["{}"], "expected traces (*.json, *.json.gz) in the directory"),
        (["{}/text.txt"], "text.txt: expected a Chrome trace"),
        (["{}/text.txt", "--stage-regex", "("], "expected a regular expression"),
        ([], "required: TRACE"),
    ],
)
def test_a_wrong_input_is_one_line_and_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    command = [sys.executable, "-m", "omni_lab.gaps", *(one.format(tmp_path) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip() and "reading" not in line]
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 1 and message in lines[0]


def test_comparison_finds_a_change_and_nothing_in_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = noisy(300, 1).write(tmp_path / "before.json")
    same, faster = noisy(300, 2).write(tmp_path / "same.json"), noisy(100, 3).write(tmp_path / "faster.json")
    result = printed(capsys, before, "--compare", same)
    assert [(one["figure"], one["verdict"]) for one in result["comparison"]] == [("median", "none"), ("mean", "none")]
    result = printed(capsys, before, "--compare", faster)
    for one in result["comparison"]:
        assert (
            one["verdict"] == "shorter"
            and 0.2 < one["low"] < one["ratio"] < one["high"] < 0.5
            and one["worker"] == "talker_r0"
        )
    assert [one["name"] for one in result["other"]] == ["talker_r0"]
    assert gaps.main([str(faster), "--compare", str(before)]) == 0
    assert "change: longer" in capsys.readouterr().out


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Of two series alike in distribution, whose values depend on those before, few are said to differ."""
    random = np.random.default_rng(0)

    def series() -> np.ndarray:
        value, values = 0.0, []
        for noise in random.normal(0, 0.1, 400):
            value = 0.7 * value + noise
            values.append(300 * np.exp(value))
        return np.array(values)

    verdicts = [changed(series(), series(), np.mean, seed).verdict for seed in range(25)]
    assert verdicts.count("none") >= 21


def test_too_few_gaps_and_gaps_of_zero_have_no_interval() -> None:
    few = changed(np.arange(1.0, 6), np.arange(1.0, 6) * 9, np.median)
    assert few.ratio == pytest.approx(9) and few.low is None and few.verdict == "none"
    none = changed(np.zeros(50), np.ones(50), np.median)
    assert none.ratio is None and none.verdict == "none"
