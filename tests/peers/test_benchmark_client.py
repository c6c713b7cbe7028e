"""vLLM-Omni's own benchmark client, unchanged, against this project's server and against prepared answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_lab.experiment import load_experiment
from omni_lab.metrics.aggregate import repeat_figures
from omni_lab.workload.client import closed_loop
from omni_lab.workload.echo import chat_requests, echo_server
from omni_lab.workload.http_client import connect
from tests.serving import served

ROOT = Path(__file__).parent.parent.parent
CHECKPOINT = ROOT / "build" / "peers" / "nano"
CLIENT = Path(os.environ.get("OMNI_LAB_PEERS", ".venv-peers")).absolute() / "bin" / "vllm-omni"
COUNT, CONCURRENCY = 64, 16
SYSTEM_PROMPT = "You are a helpful assistant."
PAUSE_S = 0.1
"""Between prepared events: long beside the time for which vLLM-Omni's client decodes sound while it streams."""

EXPERIMENT = f"""
name: served
model: {{checkpoint: {CHECKPOINT}}}
executor: inline
connector: in_process
optimizations: {{graphs: {{thinker: false, talker: false, code2wav: false}}}}
stages: {{talker: {{sampling: {{max_tokens: 40}}}}}}
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "served.yaml"
    file.write_text(EXPERIMENT)
    with served(load_experiment(file)) as running:
        yield running.url


def bench(url: str, folder: Path) -> dict:
    """What the client reports of 64 streamed requests, 16 at a time."""
    texts = folder / "texts" / "en"
    texts.mkdir(parents=True)
    rows = [f"u{index}|reference|prompt.wav|Please answer the question number {index}." for index in range(COUNT)]
    (texts / "meta.lst").write_text("\n".join(rows) + "\n")
    (texts / "prompt.wav").touch()
    arguments = {
        "backend": "openai-chat-omni",
        "endpoint": "/v1/chat/completions",
        "base-url": url,
        "model": CHECKPOINT.name,
        "tokenizer": CHECKPOINT,
        "dataset-name": "seed-tts-text",
        "dataset-path": folder / "texts",
        "seed-tts-system-prompt": SYSTEM_PROMPT,
        "output-len": 20,
        "extra-body": json.dumps({"voice": "ethan", "modalities": ["text", "audio"]}),
        "num-prompts": COUNT,
        "max-concurrency": CONCURRENCY,
        "percentile-metrics": "ttft,e2el,audio_ttfp,audio_rtf,audio_duration",
        "result-dir": folder,
        "result-filename": "result.json",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(CLIENT), "bench", "serve", "--omni", *words, "--save-result", "--save-detailed"]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def test_all_requests_complete_against_our_server(url: str, tmp_path: Path) -> None:
    result = bench(url, tmp_path)
    assert (result["completed"], result["failed"]) == (COUNT, 0)
    assert result["num_audio_ttfp_samples"] == result["num_audio_rtf_samples"] == COUNT
    assert 0 < result["mean_ttft_ms"] < result["mean_audio_ttfp_ms"] < result["mean_e2el_ms"]
    assert result["total_audio_duration_s"] > 0


def test_both_clients_measure_the_same(tmp_path: Path) -> None:
    """On prepared answers that come at a fixed pace, the means of TTFP, RTF and E2EL agree within 5 %."""

    async def ours(url: str) -> dict:
        async with connect(url, model="echo") as target:
            sent = await closed_loop(target.send, chat_requests("agree", COUNT), CONCURRENCY)
            await target.take_records()
            return repeat_figures(sent.rows, CONCURRENCY, 24_000, sent.cpu_s)

    with echo_server(PAUSE_S) as url:
        our = asyncio.run(ours(url))
        their = bench(url, tmp_path)
    assert our["completed"] == their["completed"] == COUNT
    for name in ("mean_audio_ttfp_ms", "mean_audio_rtf", "mean_e2el_ms"):
        assert their[name] == pytest.approx(our[name], rel=0.05), name
