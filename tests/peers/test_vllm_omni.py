"""The real vLLM-Omni on this machine's CPU, through this project's platform plugin, against this project's pipeline."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile

from omni_lab.run import main

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "experiments" / "vllm_omni.yaml"
COUNT, FRAMES = 8, 60
"""Requests, and frames of each answer."""

EAGER = "optimizations={graphs: {thinker: false, talker: false, code2wav: false}}"
RUNGS = "sweep.rungs=[{name: vllm_omni}, {name: in_process, target: pipeline, executor: inline, connector: in_process}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of both: eight prompts, then the same ones eight at a time."""
    out = tmp_path_factory.mktemp("peers") / "run"
    load = f"workload={{num_prompts: {COUNT}, concurrency: [1, {COUNT}], repeats: 1, warmup: 1}}"
    kept = f"results={{save_audio: {COUNT}, save_tokens: true}}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = f"vllm_omni.port={listener.getsockname()[1]}"
    options = [word for text in (load, kept, EAGER, RUNGS, port) for word in ("--set", text)]
    assert main([str(FILE), *options, "--out", str(out)]) == 0
    return out


def lines(run: Path, name: str, concurrency: int) -> list[dict]:
    found = map(json.loads, (run / "requests.jsonl").read_text().splitlines())
    own = [line for line in found if (line["configuration"], line["concurrency"]) == (name, concurrency)]
    return sorted(own, key=lambda line: line["index"])


@pytest.mark.parametrize("concurrency", [1, COUNT])
def test_every_request_is_answered_and_measured(run: Path, concurrency: int) -> None:
    theirs = lines(run, "vllm_omni", concurrency)
    assert [line["error"] for line in theirs] == [None] * COUNT
    assert all((line["text_tokens"], line["codec_frames"]) == (40, FRAMES) for line in theirs)
    for line in theirs:  # on a busy machine its first text may come with its first sound or behind it
        assert 0 < line["ttft_ms"] < line["e2el_ms"] and 0 < line["audio_ttfp_ms"] < line["e2el_ms"]
    assert all(line["audio_rtf"] > 0 and line["audio_underrun_s"] >= 0 for line in theirs)


@pytest.mark.parametrize("concurrency", [1, COUNT])
def test_both_answer_the_same(run: Path, concurrency: int) -> None:
    """Greedy text token for token; and the codes, as the sound that both make of the same frames."""
    for theirs, ours in zip(lines(run, "vllm_omni", concurrency), lines(run, "in_process", concurrency), strict=True):
        assert theirs["prompt"] == ours["prompt"] and theirs["prompt_tokens"] == ours["prompt_tokens"]
        assert theirs["text_token_ids"] == ours["text_token_ids"]
        assert theirs["audio_chunk_samples"] == ours["audio_chunk_samples"]
        their_sound, our_sound = (soundfile.read(run / line["audio_file"])[0] for line in (theirs, ours))
        np.testing.assert_allclose(their_sound, our_sound, atol=1e-4)


def test_the_server_is_gone(run: Path) -> None:
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if "vllm-omni" in command and str(run) in command]
    record = json.loads((run / "run.json").read_text())
    told = record["configurations"]["vllm_omni"]["effective"]
    assert told["environment"]["VLLM_OMNI_CPU_COMPILE"] == "0" and told["command"][1] == "serve"
