"""Qwen3-Omni as a stage graph: Thinker -> Talker -> Code2Wav, or transformers' own model in one stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_lab.core import CLIENT, PipelineError, PipelineSpec, StageSpec
from omni_lab.engine.clock import StepClock
from omni_lab.engine.kv_cache import KVCache, rows_within
from omni_lab.engine.rows import HostRows, ResidentRows
from omni_lab.engine.stage import Stage
from omni_lab.engine.traced import TracedPass, TracedPrefill, TracedStep
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

ROWS = {"resident": ResidentRows, "host": HostRows}


@dataclass(frozen=True, slots=True)
class Built:
    """A stage, the rows that its batch can have, and facts for the record."""

    stage: Stage
    rows: int
    facts: dict[str, Any]


def build_stage(plan: StagePlan, clock: StepClock) -> Built:
    """The stage of a plan with its weights loaded.

    Each stage reads its own tensors only. Raises PipelineError that names the tensor, file or key to mend.
    """
    directory, device, dtype = Path(plan.checkpoint), torch.device(plan.device), getattr(torch, plan.dtype)
    if plan.stage == "transformers":
        from omni_lab.families.qwen3_omni.reference import TransformersStage

        return Built(TransformersStage(directory, device, dtype, clock), 1, {})
    values = read_config(directory)
    if plan.stage == "thinker" and plan.engine == "vllm":
        return _vllm_thinker(plan, parse_config(values), clock)
    build = {"thinker": _thinker, "talker": _talker, "code2wav": _code2wav}[plan.stage]
    return build(plan, directory, parse_config(values), device, dtype, clock)


def _thinker(
    plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype, clock: StepClock
) -> Built:
    from omni_lab.families.qwen3_omni.prefill_steps import EagerPrefill
    from omni_lab.families.qwen3_omni.steps import CapturedDecode, EagerDecode, choose_step
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
    prefill = EagerPrefill(network, cache, capture=config.talker.accept_hidden_layer)
    decode, prefill, graphs = choose_step(plan, EagerDecode(network, cache), CapturedDecode, prefill, rows)
    state = ROWS[plan.state](rows, device, network.decoder.rotation.axes)
    stage = ThinkerStage(
        config, network, audio_tower, vision_tower, cache, prefill, decode, state, plan.max_length, device, clock
    )
    return Built(stage, rows, _facts(slots, rows) | graphs)


def _vllm_thinker(plan: StagePlan, config: OmniConfig, clock: StepClock) -> Built:
    try:
        from omni_lab.families.qwen3_omni.vllm_model import engine_rows, open_engine, tower_slots
        from omni_lab.families.qwen3_omni.vllm_thinker import VllmThinkerStage
    except (ImportError, OSError, RuntimeError) as error:  # the last two from libraries that do not fit each other
        raise PipelineError(
            f"stages.thinker.engine: vllm cannot be imported ({error}); pip install 'omni-lab[vllm]', or on a CPU "
            "`make vllm` (docs/vllm.md), or use engine torch"
        ) from error
    text = config.thinker.text
    rows = engine_rows(plan, text)
    stage = VllmThinkerStage(open_engine(plan, text, rows), config.im_end, clock)
    return Built(stage, rows, _facts(tower_slots(text, getattr(torch, plan.dtype)), rows))


def _talker(
    plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype, clock: StepClock
) -> Built:
    from omni_lab.families.qwen3_omni.prefill_steps import EagerPrefill
    from omni_lab.families.qwen3_omni.steps import CapturedFrame, EagerFrame, choose_step
    from omni_lab.families.qwen3_omni.talker import TalkerStage
    from omni_lab.models.qwen3_omni.rotary import LinearRotation, MultimodalRotation
    from omni_lab.models.qwen3_omni.talker import Talker

    if plan.predictor == "generate":
        from omni_lab.models.qwen3_omni.generate_predictor import GeneratePredictor as Predictor
    else:
        from omni_lab.models.qwen3_omni.code_predictor import CodePredictor as Predictor
    rotation = {"linear": LinearRotation, "multimodal": MultimodalRotation}[plan.positions]
    text = config.thinker.text
    network = Talker(config.talker, text.hidden_size, text.vocab_size, dtype, device, Predictor, rotation)
    slots = network.slots("talker.")
    load_weights(directory, slots, ("talker.",))
    network.prepare()
    cache, rows = _cache(plan, config.talker.text, dtype, device)
    state = ROWS[plan.state](rows, device, rotation.axes, config.talker.text.hidden_size, dtype)
    prefill = EagerPrefill(network, cache)
    frame, prefill, graphs = choose_step(plan, EagerFrame(network, cache), CapturedFrame, prefill, rows)
    stage = TalkerStage(network, cache, prefill, frame, state, plan.max_length, device, clock)
    return Built(stage, rows, _facts(slots, rows) | graphs)


def _code2wav(
    plan: StagePlan, directory: Path, config: OmniConfig, device: torch.device, dtype: torch.dtype, clock: StepClock
) -> Built:
    from omni_lab.engine.host_memory import keep_freed_memory
    from omni_lab.families.qwen3_omni.code2wav import Code2WavStage
    from omni_lab.families.qwen3_omni.vocoder_steps import choose_pass
    from omni_lab.families.qwen3_omni.vocoders import StatefulVocoder, WindowVocoder
    from omni_lab.models.qwen3_omni.code2wav import Code2Wav

    keep_freed_memory()
    network = Code2Wav(config.code2wav, dtype, device)
    slots = network.slots("code2wav.")
    load_weights(directory, slots, ("code2wav.",))
    network.prepare()
    step, graphs = choose_pass(plan, network)
    vocoder = {
        "context": lambda: WindowVocoder(network, device, plan.left_context, step),
        "stateful": lambda: StatefulVocoder(network, device, step),
    }[plan.vocoder]
    return Built(Code2WavStage(vocoder(), clock), plan.rows, _facts(slots, plan.rows) | graphs)


def graph_names(plan: StagePlan) -> list[tuple[str, int]]:
    """(name, smallest batch) of each graph that a plan's captured step needs on a CPU."""
    from omni_lab.engine.compiled import sizes
    from omni_lab.families.qwen3_omni.prefill_steps import has_prefill_graph, prefill_name
    from omni_lab.families.qwen3_omni.steps import TRACES
    from omni_lab.families.qwen3_omni.vocoder_steps import pass_names

    if plan.stage == "code2wav":
        return [(name, 1) for name in pass_names(plan)]
    prefills = [(prefill_name(plan.stage), 1)] if has_prefill_graph(plan) else []
    return [(name, size) for name in TRACES[plan.stage] for size in sizes(plan.rows)] + prefills


def traced_step(built: Built, name: str) -> TracedStep | TracedPass | TracedPrefill:
    """The step of a stage that was built without graphs, to be compiled; `name` is one of `graph_names`."""
    from omni_lab.families.qwen3_omni.prefill_steps import prefill_name, traced_prefill
    from omni_lab.families.qwen3_omni.steps import TRACES
    from omni_lab.families.qwen3_omni.vocoder_steps import traced_pass

    if built.stage.name == "code2wav":
        return traced_pass(built.stage.vocoder.network, built.rows, name)
    if name == prefill_name(built.stage.name):
        return traced_prefill(built.stage.name, built.stage.prefill, built.rows)
    trace = TRACES[built.stage.name][name]
    return trace(built.stage.network, built.stage.cache, built.rows)


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
