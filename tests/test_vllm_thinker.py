"""Where vLLM is not installed, an experiment that asks for it says how to get it. (What it does is in tests/vllm.)"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from omni_lab.assemble import open_pipeline
from omni_lab.core import PipelineError
from tests.pipelines import experiment

EAGER = tuple(f"optimizations.graphs.{stage}=false" for stage in ("thinker", "talker", "code2wav"))
VLLM = ("stages.thinker.engine=vllm", *EAGER)
HOW = r"stages.thinker.engine: vllm cannot be imported .*pip install 'omni-lab\[vllm\]'.*docs/vllm.md"


def start(setup) -> None:
    async def run() -> None:
        async with open_pipeline(setup):
            raise AssertionError("the pipeline started without vLLM")

    asyncio.run(run())


def test_without_vllm_the_pipeline_says_how_to_install_it(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("omni_lab.families.qwen3_omni.vllm_")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # what `import vllm` finds where it is not installed
    with pytest.raises(PipelineError, match=HOW):
        start(experiment(nano, "executor=inline", "connector=in_process", *VLLM))


def test_a_worker_without_vllm_says_how_to_install_it(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\")\n")  # also where it is
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PipelineError, match=f"worker thinker.*{HOW}"):
        start(experiment(nano, "executor=process", "connector=shared_memory", *VLLM))
