"""`.venv/bin/python results/reference/traces/make.py NAME...`: makes the traces beside this file anew; minutes.

omni_lab: the Talker's steps, captured by an experiment. vllm: a tiny model in vLLM's engine, captured by itself
(first `make vllm`). vllm_omni: the Thinker in vLLM-Omni's server, captured through it (first `make peers`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from transformers import Qwen3Config

from omni_lab.experiment import load_experiment
from omni_lab.metrics.records import RequestRow
from omni_lab.peers import vllm_omni as peer
from omni_lab.workload.dataset import load_dataset
from omni_lab.workload.http_client import connect
from omni_lab.workload.requests import make_request

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
EAGER = "optimizations.graphs={thinker: false, talker: false, code2wav: false}"
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread a worker, and names for what vLLM does between its operators."""

VLLM = """
import sys
from vllm import LLM, SamplingParams

model, traces = sys.argv[1:]
profiler = {"profiler": "torch", "torch_profiler_dir": traces, "torch_profiler_with_stack": False}
engine = LLM(
    model, load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4,
    enforce_eager=True, kv_cache_memory_bytes=64 << 20, profiler_config=profiler,
)
prompts = [{"prompt_token_ids": [1, 2, 3 + number]} for number in range(4)]
sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
engine.generate(prompts, sampling)
engine.start_profile()
engine.generate(prompts, sampling)
engine.stop_profile()
"""
"""Captures one batch after a warm-up, as vLLM's documentation does it."""


def omni_lab(folder: Path) -> None:
    """Eight steps of the Talker with four answers in flight, in `folder`/run/traces."""
    settings = [
        "model.checkpoint=nano",
        "optimizations.graphs={thinker: false, talker: true, code2wav: false}",
        "workload={concurrency: 4, num_prompts: 4, repeats: 1, output: {text_tokens: 20, codec_frames: 30}}",
        "profile={enabled: true, stages: [talker], skip_steps: 8, steps: 8}",
    ]
    command = [sys.executable, "-m", "omni_lab.run", "experiments/async_output.yaml", "--out", str(folder / "run")]
    subprocess.run([*command, *(f"--set={one}" for one in settings)], cwd=ROOT, env=ENVIRONMENT, check=True)


def vllm(folder: Path) -> None:
    """Four answers of 16 tokens from two layers of random weights."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    ).save_pretrained(folder / "model")
    command = [str(ROOT / ".venv-vllm/bin/python"), "-c", VLLM, str(folder / "model"), str(folder / "traces")]
    subprocess.run(command, env=ENVIRONMENT, check=True)


def vllm_omni(folder: Path) -> None:
    """Nine tokens of vLLM-Omni's Thinker; the request before it warms it up."""
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder / "traces"), "torch_profiler_with_stack": False}
    server = {
        "stage_overrides": {"thinker": {"profiler_config": profiler}},
        "environment": {"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"},
        "arguments": ["--init-timeout", "1800", "--stage-init-timeout", "900"],
        "startup_s": 1800,
    }
    settings = ["sweep=null", EAGER, "workload.output={text_tokens: 9, codec_frames: 3}"]
    settings += [f"vllm_omni.{key}={json.dumps(value)}" for key, value in server.items()]
    experiment = load_experiment(ROOT / "experiments" / "vllm_omni.yaml", settings)
    process = peer.prepare(experiment, folder)
    prompts = load_dataset(experiment.workload).take(2, experiment.workload.seed)

    async def capture() -> None:
        async with process.running(), connect(process.url, speaker=peer.default_speaker(experiment)) as target:
            for number, prompt in enumerate(prompts):
                if number:
                    await (await target.session.post(f"{process.url}/start_profile", json={"stages": [0]})).read()
                request = make_request(experiment, prompt, number, "traced")
                await target.send(request, RequestRow(request.id, number, 0), False)
            await (await target.session.post(f"{process.url}/stop_profile", json={"stages": [0]})).read()

    asyncio.run(capture())


MADE: dict[str, Callable[[Path], None]] = {"omni_lab": omni_lab, "vllm": vllm, "vllm_omni": vllm_omni}

if __name__ == "__main__":
    for name in sys.argv[1:] or MADE:
        with TemporaryDirectory() as folder:
            MADE[name](Path(folder))
            (made,) = Path(folder).rglob("*.trace.json.gz")
            copyfile(made, HERE / f"{name}.trace.json.gz")
