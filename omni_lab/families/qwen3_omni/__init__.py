"""Qwen3-Omni as a stage graph: Thinker -> Talker -> Code2Wav, or transformers' own model in one stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from omni_lab.core import CLIENT, PipelineError, PipelineSpec, StageSpec
from omni_lab.engine.clock import StepClock
from omni_lab.engine.kv_cache import KVCache, rows_within
from omni_lab.engine.stage import Stage
from omni_lab.families.plan import StagePlan
from omni_lab.models.qwen3_omni.config import DecoderConfig, OmniConfig, parse_config
from omni_lab.models.qwen3_omni.invariance import INVARIANT_WINDOW
from omni_lab.models.qwen3_omni.weights import load_weights, read_config

STAGED = PipelineSpec(
    stages=(
        StageSpec("thinker", "autoregressive", ("text",)),
        StageSpec("talker", "autoregressive"),
        StageSpec("code2wav", "generation", ("audio",)),
    ),
    edges=(
        (CLIENT, "thinker"),
        ("thinker", CLIENT),
        ("thinker", "talker"),
        ("talker", "code2wav"),
        ("code2wav", CLIENT),
    ),
)
REFERENCE = PipelineSpec(
    stages=(StageSpec("transformers", "generation", ("text", "audio")),),
    edges=((CLIENT, "transformers"), ("transformers", CLIENT)),
)


@dataclass(frozen=True, slots=True)
class Built:
    """A stage, the rows that its batch can have, and facts for the record."""

    stage: Stage
    rows: int
    facts: dict[str, int]


def build_stage(plan: StagePlan, clock: StepClock) -> Built:
    """The stage of a plan with its weights loaded.

    Each stage reads its own tensors only. Raises PipelineError that names the tensor, file or key to mend.
    """
    directory, device, dtype = Path(plan.checkpoint), torch.device(plan.device), getattr(torch, plan.dtype)
    if plan.stage == "transformers":
        from omni_lab.families.qwen3_omni.reference import TransformersStage

        return Built(TransformersStage(directory, device, dtype, clock), 1, {})
    values = read_config(directory)
    build = {"thinker": _thinker, "talker": _talker, "code2wav": _code2wav}[plan.stage]
    return build(plan, directory, parse_config(values), device, dtype)


def _thinker(plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype) -> Built:
    from omni_lab.families.qwen3_omni.thinker import ThinkerStage
    from omni_lab.models.qwen3_omni.audio_tower import AudioTower
    from omni_lab.models.qwen3_omni.thinker import Thinker
    from omni_lab.models.qwen3_omni.vision_tower import VisionTower

    network = Thinker(config.thinker.text, dtype, device)
    audio_tower = AudioTower(config.thinker.audio, dtype, device)
    vision_tower = VisionTower(config.thinker.vision, dtype, device)
    slots = network.slots("thinker.")
    slots |= audio_tower.slots("thinker.audio_tower.") | vision_tower.slots("thinker.visual.")
    load_weights(directory, slots, ("thinker.",))
    network.prepare()
    cache, rows = _cache(plan, config.thinker.text, dtype, device)
    stage = ThinkerStage(config, network, audio_tower, vision_tower, cache, rows, plan.max_length, device)
    return Built(stage, rows, _facts(slots, rows))


def _talker(plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype) -> Built:
    from omni_lab.families.qwen3_omni.talker import TalkerStage
    from omni_lab.models.qwen3_omni.talker import Talker

    network = Talker(config.talker, config.thinker.text.hidden_size, config.thinker.text.vocab_size, dtype, device)
    slots = network.slots("talker.")
    load_weights(directory, slots, ("talker.",))
    network.prepare()
    cache, rows = _cache(plan, config.talker.text, dtype, device)
    return Built(TalkerStage(network, cache, rows, plan.max_length, device), rows, _facts(slots, rows))


def _code2wav(plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype) -> Built:
    from omni_lab.families.qwen3_omni.code2wav import Code2WavStage
    from omni_lab.models.qwen3_omni.code2wav import Code2Wav

    network = Code2Wav(config.code2wav, dtype, device)
    slots = network.slots("code2wav.")
    load_weights(directory, slots, ("code2wav.",))
    network.prepare()
    return Built(Code2WavStage(network, plan.left_context, device), plan.rows, _facts(slots, plan.rows))


def _facts(slots: dict[str, torch.Tensor], rows: int) -> dict[str, int]:
    return {"weight_bytes": sum(slot.nbytes for slot in slots.values()), "rows": rows}


def _cache(plan: StagePlan, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> tuple[KVCache, int]:
    """As many rows of `max_length` positions as the stage may batch and its memory budget pays for."""
    shape = (config.kv_heads, plan.max_length + -plan.max_length % INVARIANT_WINDOW, config.head_dim)
    rows = min(plan.rows, rows_within(plan.cache_bytes, config.layers, *shape, dtype))
    if rows < 1:
        raise PipelineError(
            f"stages.{plan.stage}: kv_cache_mb {plan.cache_bytes >> 20} does not hold one sequence of max_model_len "
            f"{plan.max_length}; raise kv_cache_mb or lower max_model_len"
        )
    return KVCache(config.layers, rows, *shape, dtype, device), rows
