"""The traces that vLLM's own profiler writes, of a model that is not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_lab.tracing.gaps import analyse

PROGRAM = """
import sys
from transformers import Qwen3Config
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    directory, traces = sys.argv[1:]
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
    ).save_pretrained(directory)
    engine = LLM(
        directory, load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4,
        enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        profiler_config={"profiler": "torch", "torch_profiler_dir": traces, "torch_profiler_with_stack": False},
    )
    prompts = [{"prompt_token_ids": [1, 2, 3 + index]} for index in range(3)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.start_profile()
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.stop_profile()
"""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.mark.parametrize("scopes", ["0", "1"])
def test_traces_of_vllms_own_profiler(scopes: str, tmp_path: Path) -> None:
    """Three requests, one prefill together, then 23 tokens each; with its scopes on, causes have names."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | ENVIRONMENT | {"VLLM_CUSTOM_SCOPES_FOR_PROFILING": scopes}
    command = [sys.executable, tmp_path / "program.py", tmp_path / "model", tmp_path / "traces"]
    subprocess.run(command, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
    analysis = analyse(tmp_path / "traces")
    worker = analysis.workers.iloc[0]
    assert len(analysis.workers) == 1 and worker.status == "ok", worker.reason
    assert worker.steps == 24 and "(vLLM)" in worker.found
    assert set(analysis.gaps.batch) == {3} and 0 < worker.idle_share < 0.9
    named = analysis.causes.cause.str.startswith(("llm_engine step", "schedule")).any()
    assert named == (scopes == "1")
