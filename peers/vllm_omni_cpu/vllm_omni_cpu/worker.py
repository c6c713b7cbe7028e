"""vLLM's CPU worker around vLLM-Omni's model runners.

vLLM-Omni's runners are written over vLLM's GPU runner, and vLLM's CPU runner is one too: a class that inherits from
both has the stages of the first on the tensors of the second.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _Torch:
    """The module torch, with the model's type where the code says `torch.bfloat16`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bfloat16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _OnCPU:
    """What has to come from vLLM's CPU runner although vLLM-Omni's runner comes first."""

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        return CPUModelRunner._to_list(self, sampled_token_ids)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        self.model_memory_usage = 0  # the GPU runner's profiler would fill it in
        if self.compilation_config.max_cudagraph_capture_size is None:  # vLLM-Omni compares it with a number
            self.compilation_config.max_cudagraph_capture_size = 0
        qwen3_omni.torch = _Torch(self.model_config.dtype)  # the hand-off to the Talker is bfloat16 for any model
        super().load_model(*arguments, **options)
        if os.environ.get("VLLM_OMNI_CPU_GREEDY_CODES") == "1":
            for module in self.model.modules():
                if hasattr(module, "set_sampling_params"):  # the code predictor
                    module.set_sampling_params(1, 1.0)


class CPUARModelRunner(_OnCPU, GPUARModelRunner, CPUModelRunner):
    """Thinker and Talker."""


class CPUGenerationModelRunner(_OnCPU, GPUGenerationModelRunner, CPUModelRunner):
    """Code2Wav."""


class _Worker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type[CPUModelRunner]
    """vLLM-Omni looks here for the hand-offs that the runner can do."""

    def init_device(self) -> None:
        """Sets the process up as vLLM does, then puts vLLM-Omni's runner in the place of vLLM's."""
        self.use_v2_model_runner = False
        super().init_device()
        self.use_v2_model_runner = False
        self.model_runner = self.model_runner_cls(self.vllm_config, torch.device("cpu"))


class CPUARWorker(_Worker):
    model_runner_cls = CPUARModelRunner


class CPUGenerationWorker(_Worker):
    model_runner_cls = CPUGenerationModelRunner
