"""The command itself on the smallest checkpoint: files, table, exit statuses, resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import soundfile

from omni_lab.metrics.definitions import DISTRIBUTIONS
from omni_lab.run import main
from tests.pipelines import SMALL

ROOT = Path(__file__).parent.parent
PATIENCE_S = 300
"""Only so that a hanging run cannot hang the tests; nothing here depends on speed."""

EXPERIMENT = (
    SMALL
    + """\
stages: {thinker: {sampling: {max_tokens: 12}}, talker: {sampling: {max_tokens: 9}}}
chunking: {initial_frames: 2, frames: 5, left_context: 5}
workload: {num_prompts: 3, concurrency: [1, 2], warmup: 1, repeats: 2}
results: {save_audio: 1, save_tokens: true}
"""
)


@pytest.fixture
def experiment(tmp_path: Path, nano: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(EXPERIMENT)
    return file


def start(experiment: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omni_lab.run", str(experiment), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=experiment.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


@dataclass
class Done:
    status: int
    out: list[str]
    err: str


@pytest.fixture
def run(experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, which saves the start: for runs that nobody interrupts."""
    monkeypatch.chdir(experiment.parent)

    def call(file: Path, *options: str) -> Done:
        status = main([str(file), *options])
        out, err = capsys.readouterr()
        return Done(status, out.splitlines(), err)

    return call


def finished(directory: Path) -> list[tuple]:
    """Configuration, concurrency and repeat of everything that run.json counts."""
    file = directory / "run.json"
    cells = json.loads(file.read_text())["cells"] if file.is_file() else []
    return [(cell["configuration"], cell["concurrency"], one["repeat"]) for cell in cells for one in cell["runs"]]


def wait_for_cells(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(finished(directory)) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no cell was finished"
        time.sleep(0.02)


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


def test_run_in_processes_writes_what_the_contract_says(experiment: Path, tmp_path: Path) -> None:
    process = start(experiment, "--set", "executor=process", "--set", "connector=shared_memory")
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    out = stdout.splitlines()
    directory = tmp_path / out[-1]
    assert directory.parent == tmp_path / "results" / "small"
    assert [line.split()[:2] for line in out[2:4]] == [["small", "1"], ["small", "2"]]
    for words in ("small: loading", "small-c1-r0: warm-up", "small-c2-r1", "small: ready after "):
        assert words in stderr
    check_record(json.loads((directory / "run.json").read_text()))
    check_requests(directory)
    steps, chunks = (pd.read_parquet(directory / f"{name}.parquet") for name in ("steps", "chunks"))
    assert set(steps["stage"]) == {"thinker", "talker", "code2wav"}
    assert (steps["end_ns"] >= steps["start_ns"]).all() and (steps["batch"] >= 1).all()
    talker = steps[(steps["stage"] == "talker") & (steps["concurrency"] == 1) & (steps["repeat"] == 0)]
    asked = [line for line in lines(directory) if (line["concurrency"], line["repeat"]) == (1, 0)]
    assert talker["tokens"].sum() >= sum(line["codec_frames"] for line in asked)
    to_client = chunks[chunks["edge"] == "code2wav->client"].groupby("request")["frames"].sum()
    assert to_client.to_dict() == {line["id"]: line["codec_frames"] for line in lines(directory)}
    assert (directory / "report.html").stat().st_size > 0


def check_record(record: dict) -> None:
    assert record["schema_version"] == 1
    assert record["experiment"]["stages"]["talker"]["sampling"]["max_tokens"] == 9
    assert record["definitions"] and record["environment"]["packages"]["torch"]
    assert record["configurations"]["small"]["effective"]
    (start,) = record["configurations"]["small"]["starts"]
    assert 0 <= start["compile_s"] < start["ready_s"] and start["compiled_graphs"] == 0
    assert [(cell["configuration"], cell["concurrency"]) for cell in record["cells"]] == [("small", 1), ("small", 2)]
    names = ["completed", "failed", "duration", "request_throughput", "output_throughput", "audio_throughput"]
    names += [f"{figure}_{name}" for figure in ("mean", "median", "p99") for name in DISTRIBUTIONS]
    names += ["audio_continuity_ok_rate", "mean_dispatch_delay_ms", "mean_requests_in_flight", "hit_max_frames"]
    names += ["steady_request_throughput", "client_busy_share"]
    stage_names = ["steps", "mean_batch", "step_ms", "gap_us_median", "gap_us_p99", "busy_ratio", "tokens_per_s"]
    for cell in record["cells"]:
        assert cell["repeats"] == 2
        assert (cell["completed"], cell["failed"], cell["failed_std"]) == (3, 0, 0)
        assert all(name in cell and f"{name}_std" in cell for name in names)
        for stage in ("thinker", "talker", "code2wav"):
            assert all(cell["stages"][stage][name] is not None for name in stage_names)
        assert cell["mean_audio_ttfp_ms"] <= cell["mean_e2el_ms"]
        assert 0 < cell["mean_requests_in_flight"] <= cell["concurrency"] + 1e-9
        assert cell["littles_law_ratio"] == pytest.approx(1, abs=0.05)


def check_requests(directory: Path) -> None:
    requests = lines(directory)
    assert len({line["id"] for line in requests}) == len(requests) == 12
    for line in requests:
        assert line["error"] is None and line["prompt_tokens"] == len(line["prompt_token_ids"])
        assert 0 < line["text_tokens"] <= 12 and len(line["text_token_ids"]) == line["text_tokens"]
        assert line["codec_frames"] == len(line["codes"]) == sum(line["audio_chunk_frames"])
        assert all(len(frame) == 16 for frame in line["codes"])
        assert 0 < line["ttft_ms"] <= line["audio_ttfp_ms"] <= line["e2el_ms"]
        assert line["target_text"] and line["first_wave"] == (line["index"] < line["concurrency"])
    same = {}
    for line in requests:  # a request's answer depends neither on concurrency nor on repeat
        same.setdefault(line["index"], set()).add(json.dumps([line["text_token_ids"], line["codes"]]))
    assert [len(answers) for answers in same.values()] == [1, 1, 1]
    saved = [line for line in requests if line["audio_file"]]
    assert [(line["concurrency"], line["repeat"], line["index"]) for line in saved] == [(1, 0, 0), (2, 0, 0)]
    for line in saved:
        samples, rate = soundfile.read(directory / line["audio_file"])
        assert rate == 24_000 and len(samples) == sum(line["audio_chunk_samples"])


def test_interrupted_and_killed_runs_go_on(experiment: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    """Ctrl-C after one cell, SIGKILL after another, half a line left behind: what was finished is never run again."""
    directory = tmp_path / "out"
    options = ("--quiet", "--out", str(directory), "--set", "workload.num_prompts=8")
    first = start(experiment, *options)
    wait_for_cells(first, directory, 1)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, err
    assert out.splitlines()[-1] == str(directory) and "--resume" in err and "Traceback" not in err
    kept = finished(directory)
    assert 1 <= len(kept) < 4

    second = start(experiment, *options, "--resume")
    wait_for_cells(second, directory, len(kept) + 1)
    second.kill()
    second.communicate()
    with (directory / "requests.jsonl").open("a") as file:
        file.write('{"id": "half')
    before = {line["id"]: line for line in lines_until_broken(directory)}

    third = run(experiment, *options, "--resume")
    assert third.status == 0, third.err
    assert sorted(finished(directory)) == [("small", load, repeat) for load in (1, 2) for repeat in (0, 1)]
    requests = lines(directory)
    assert Counter((line["concurrency"], line["repeat"]) for line in requests) == dict.fromkeys(
        [(1, 0), (2, 0), (1, 1), (2, 1)], 8
    )
    after = {line["id"]: line for line in requests}
    assert all(after[line["id"]] == line for line in before.values() if tuple_of(line) in kept)
    steps = pd.read_parquet(directory / "steps.parquet")
    assert not steps.duplicated(["concurrency", "repeat", "stage", "start_ns"]).any()
    assert len(steps.groupby(["concurrency", "repeat", "stage"])) == 12

    again = run(experiment, *options, "--resume")
    assert again.status == 0 and lines(directory) == requests
    other = run(experiment, *options, "--resume", "--set", "workload.seed=5")
    assert other.status == 2 and "workload.seed" in other.err and other.err.count("\n") == 1


def lines_until_broken(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()[:-1]]


def tuple_of(line: dict) -> tuple:
    return line["configuration"], line["concurrency"], line["repeat"]


def test_sweep_has_a_row_for_each_configuration_and_ratios(tmp_path: Path, run: Callable[..., Done]) -> None:
    (tmp_path / "whole.yaml").write_text("name: whole\nextends: small.yaml\noptimizations: {async_chunk: false}")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "name: sweep\nsweep: {rungs: [whole.yaml, small.yaml]}\n"
        "workload: {concurrency: 2, repeats: 1, modalities: [audio], output: {text_tokens: 6, codec_frames: 7}}"
    )
    done = run(sweep, "--quiet")
    assert done.status == 0, done.err
    assert done.err == ""
    assert [line.split()[:2] for line in done.out[2:4]] == [["whole", "2"], ["small", "2"]]
    assert "relative to whole" in done.out
    directory = tmp_path / done.out[-1]
    requests = lines(directory)
    assert {line["codec_frames"] for line in requests} == {7}
    assert [line["codes"] for line in requests[:3]] == [line["codes"] for line in requests[3:]]
    cells = json.loads((directory / "run.json").read_text())["cells"]
    assert [cell["hit_max_frames"] for cell in cells] == [None, None]
    assert {len(line["audio_chunk_frames"]) for line in requests if line["configuration"] == "whole"} == {1}
    assert {tuple(line["audio_chunk_frames"]) for line in requests if line["configuration"] == "small"} == {(2, 5)}


def test_open_loop_and_requests_that_fail(experiment: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    """Poisson arrivals; an unservable request is an error of its own line; a cell without any answer fails the run."""
    chats = [
        {"messages": [{"role": "user", "content": text}], "speaker": who} for text, who in (("Hi", None), ("Hi", "x"))
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    open_loop = "workload={concurrency: null, arrivals: {rate: 50}, num_prompts: 4, repeats: 1, seed: null, warmup: 0}"
    options = ("--quiet", "--set", open_loop, "--set", "workload.dataset=chat.jsonl")
    done = run(experiment, *options, "--out", "a")
    assert done.status == 0, done.err
    requests = lines(tmp_path / "a")
    assert [line["error"] is None for line in requests] == [True, False, True, False]
    assert all("speaker" in line["error"] for line in requests if line["error"])
    cell = json.loads((tmp_path / "a" / "run.json").read_text())["cells"][0]
    assert (cell["completed"], cell["failed"], cell["concurrency"]) == (2, 2, None)
    (tmp_path / "chat.jsonl").write_text(json.dumps(chats[1]))
    failed = run(experiment, *options, "--out", "b")
    assert failed.status == 1 and failed.out[-1] == "b"
    assert "no request was completed" in failed.err and failed.err.count("\n") == 1


def test_a_toggle_that_is_not_in_effect_is_named(experiment: Path, run: Callable[..., Done]) -> None:
    toggles = "optimizations={graphs: {talker: true}, hot_path: {code_predictor: false}}"
    done = run(experiment, "--set", toggles, "--set", "workload={num_prompts: 1, repeats: 1}")
    assert done.status == 0
    assert "small: optimizations.graphs.talker is not in effect: transformers' generate" in done.err
    assert "graphs.thinker" not in done.err


def commands() -> list[list[str]]:
    lines = [line.partition("#")[0].split() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    return [line[3:] for line in lines if line[:3] == [".venv/bin/python", "-m", "omni_lab.run"]]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_readme_are_right(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*arguments, "--dry-run"]) == 0
    assert "cells, in this order:" in capsys.readouterr().out
