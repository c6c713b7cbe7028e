"""vLLM's engine with the Thinker's text tower inside: the omni checkpoint as it lies on the disk, no copy of it.

vLLM's own Qwen3-Omni wants the processors of all media. The text tower alone is a Qwen3-MoE decoder: for text the
three axes of M-RoPE carry the same position, which is plain RoPE. So vLLM is told that this is a Qwen3-MoE
(`tower_config`), and a weight loader of ours hands it the tower's tensors by the names it expects.

Importing this module imports vLLM, and sets those of its environment variables that are not set yet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in this process, when it is told to
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as any other worker, on any core
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in ENVIRONMENT.items():  # some are read while vLLM is imported
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from transformers import PretrainedConfig, Qwen3MoeConfig  # noqa: E402
from vllm import EngineArgs, LLMEngine  # noqa: E402
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader  # noqa: E402

from omni_lab.core import PipelineError  # noqa: E402
from omni_lab.engine.kv_cache import row_bytes, rows_within  # noqa: E402
from omni_lab.families.plan import StagePlan  # noqa: E402
from omni_lab.models.qwen3_omni.config import DecoderConfig, parse_config  # noqa: E402
from omni_lab.models.qwen3_omni.thinker import Thinker  # noqa: E402
from omni_lab.models.qwen3_omni.weights import load_weights, read_config  # noqa: E402

PREFIX = "thinker."
LOAD_FORMAT = "omni_lab_thinker"
BLOCK = 128
"""Positions in one block of vLLM's paged cache: its default on the CPU."""


def open_engine(plan: StagePlan, config: DecoderConfig, rows: int) -> LLMEngine:
    """The engine of a plan, weights loaded, for `rows` sequences of `plan.max_length` positions.

    `plan.step` "eager" runs the model operator by operator, "captured" as vLLM compiles it. Raises PipelineError if the
    checkpoint is not complete, or if this build of vLLM has not the device.
    """
    _check_device(plan.device)
    blocks = rows * (_padded(plan.max_length) // BLOCK) + 1  # the engine keeps one block empty
    arguments = EngineArgs(
        model=plan.checkpoint,
        load_format=LOAD_FORMAT,
        hf_overrides=partial(tower_config, config, plan.max_length),
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the checkpoint's: requests bring their own sampling
        dtype=plan.dtype,
        max_model_len=plan.max_length,
        max_num_seqs=rows,
        max_num_batched_tokens=max(plan.step_tokens, rows),
        block_size=BLOCK,
        kv_cache_memory_bytes=blocks * _block_bytes(config, getattr(torch, plan.dtype)),
        enable_prefix_caching=False,
        enforce_eager=plan.step == "eager",
        async_scheduling=False,  # a step returns the tokens that it sampled
        disable_log_stats=True,
    )
    set_num_threads = torch.set_num_threads
    try:
        return LLMEngine.from_engine_args(arguments)
    finally:
        torch.set_num_threads = set_num_threads  # vLLM disables it, for the whole process
        if meeting := os.environ.get("VLLM_DIST_IDENT"):  # a file where the ranks met (there is one), else left behind
            Path(tempfile.gettempdir(), meeting).unlink(missing_ok=True)


def engine_rows(plan: StagePlan, config: DecoderConfig) -> int:
    """Sequences of full length that the plan's memory budget holds, at most `plan.rows`: none is ever preempted.

    Raises PipelineError if there is no room for one.
    """
    dtype = getattr(torch, plan.dtype)
    budget = plan.cache_bytes - _block_bytes(config, dtype)
    shape = (config.layers, config.kv_heads, _padded(plan.max_length), config.head_dim)
    rows = min(plan.rows, rows_within(budget, *shape, dtype))
    if rows < 1:
        raise PipelineError(
            f"stages.{plan.stage}: kv_cache_mb {plan.cache_bytes >> 20} does not hold one sequence of max_model_len "
            f"{plan.max_length} in blocks of {BLOCK}; raise kv_cache_mb or lower max_model_len"
        )
    return rows


def tower_config(config: DecoderConfig, max_length: int, _: PretrainedConfig) -> Qwen3MoeConfig:
    """The text tower as vLLM's Qwen3-MoE, in place of the configuration that it read from the checkpoint."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        **config.published(),
        max_position_embeddings=max_length,
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.expert_size,
        norm_topk_prob=config.norm_topk,
        mlp_only_layers=sorted(config.dense_layers),
        tie_word_embeddings=False,
    )


@register_model_loader(LOAD_FORMAT)
class TowerLoader(BaseModelLoader):
    """Gives vLLM's model the tensors of the text tower, read from the omni checkpoint itself."""

    def download_model(self, model_config: Any) -> None:
        """The checkpoint is a directory of this machine."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        model.load_weights(tower_tensors(Path(model_config.model), model_config.dtype))


def tower_tensors(directory: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Names without `thinker.` and values of all tensors of the text tower; one layer at a time is in memory.

    Raises PipelineError, see `weights.load_weights`.
    """
    shapes = tower_slots(parse_config(read_config(directory)).thinker.text, dtype)
    for _, names in groupby(shapes, lambda name: name.split(".")[2:4]):
        slots = {name: torch.empty(shapes[name].shape, dtype=dtype) for name in names}
        load_weights(directory, slots, ())
        for name, tensor in slots.items():
            yield name.removeprefix(PREFIX), tensor


def tower_slots(config: DecoderConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tower's tensors by their names in the checkpoint, without memory."""
    return Thinker(config, dtype, "meta").slots(PREFIX)


def _padded(length: int) -> int:
    return length + -length % BLOCK


def _block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    return row_bytes(config.layers, config.kv_heads, BLOCK, config.head_dim, dtype)


def _check_device(name: str) -> None:
    from vllm.platforms import current_platform

    device = torch.device(name)
    if device.type != current_platform.device_type:
        raise PipelineError(
            f"stages.thinker.device: {name}, but the vLLM installed here is built for {current_platform.device_type}; "
            "change the device or install the other build (docs/vllm.md)"
        )
    if device.index:
        raise PipelineError(
            f"stages.thinker.device: {name}, but vLLM takes the first CUDA device that it sees; "
            f"use cuda:0 and CUDA_VISIBLE_DEVICES={device.index}"
        )
