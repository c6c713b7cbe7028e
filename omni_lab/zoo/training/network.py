"""The configuration of `voice` and its first weights: the parts of `nano`, with sizes for one voice."""

from __future__ import annotations

import copy
from typing import Any

import torch

from omni_lab.settings import merge
from omni_lab.zoo.nano_config import CODEBOOK, NANO, SPECIAL_TOKENS, TEXT_VOCAB
from omni_lab.zoo.training.codes import ENTRIES_A_BOOK, GROUPS, INFORMATIVE

SPEAKER = CODEBOOK + 254
SPEAKERS = ("lark", "ethan", "chelsie", "aiden")
"""Names of the one voice."""
TEXT_WIDTH = 128
HOLD = "<hold>"
HOLD_ID = 1017
"""A special token that is not shown: the Thinker writes it while the word before it is still being spoken."""
VOICE_TOKENS = {**SPECIAL_TOKENS, HOLD: HOLD_ID}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_CHANGES = {
    "thinker_config": {
        "text_config": {
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_attention_heads": 4,
            "num_experts": 4,
            "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5], "interleaved": True, "mrope_interleaved": True},
        },
        "audio_config": {"output_dim": TEXT_WIDTH},
        "vision_config": {"out_hidden_size": TEXT_WIDTH},
    },
    "talker_config": {
        "thinker_hidden_size": TEXT_WIDTH,
        "text_config": {
            "hidden_size": 192,
            "intermediate_size": 384,
            "moe_intermediate_size": 192,
            "shared_expert_intermediate_size": 256,
            "head_dim": 48,
            "num_experts": 4,
            "rope_parameters": {**_ROPE, "mrope_section": [8, 8, 8], "interleaved": True, "mrope_interleaved": True},
        },
        "code_predictor_config": {
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "head_dim": 48,
            "rope_parameters": _ROPE,
        },
    },
    "code2wav_config": {
        "hidden_size": 192,
        "intermediate_size": 384,
        "sliding_window": 8,
        "layer_scale_initial_scale": 0.3,
        "decoder_dim": 128,
    },
}


def config() -> dict[str, Any]:
    """config.json of the voice."""
    values = merge(copy.deepcopy(NANO), _CHANGES)
    values["talker_config"]["speaker_id"] = dict.fromkeys(SPEAKERS, SPEAKER)
    return values


def build() -> torch.nn.Module:
    """transformers' Qwen3-Omni with weights to start training from, the same ones in every call."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config()))
        _draw(network)
    return network.eval()


@torch.no_grad()
def _draw(network: torch.nn.Module) -> None:
    """transformers leaves the Talker's experts and routers at zero and scales residual branches to nothing."""
    for name, parameter in sorted(network.named_parameters()):
        module, kind = name.split(".")[-2:]
        if "norm" in module or "ln_" in module:
            parameter.fill_(1.0 if kind == "weight" else 0.0)
        elif kind == "gamma":  # ConvNeXt scale
            parameter.fill_(0.3)
        elif kind in ("alpha", "beta", "scale"):
            continue
        elif kind == "bias":
            parameter.zero_()
        elif "code_embedding" in name:
            parameter.normal_(std=1.0)
            parameter.view(GROUPS, ENTRIES_A_BOOK, -1)[INFORMATIVE:] = 0
        elif "codec_embedding" in name:
            parameter.normal_(std=0.3)
        elif "embed" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=_gain(name) * _fan_in(name, parameter) ** -0.5)
    network.code2wav.decoder[-1].conv.weight.mul_(0.1)


def _gain(name: str) -> float:
    if "head" in name:
        return 0.3
    if name.startswith(("code2wav.upsample", "code2wav.decoder")) and not _is_transposed(name):
        return 3**-0.5  # residual units add up; with 1.0 the first waveform would be a hundred times too loud
    return 0.5 if "o_proj" in name or "down_proj" in name else 1.0


def _is_transposed(name: str) -> bool:
    return ".0.conv" in name if "upsample" in name else "block.1.conv" in name


def _fan_in(name: str, weight: torch.Tensor) -> int:
    if "experts" in name and weight.ndim == 3:
        return weight.shape[-1]
    if name.startswith(("code2wav.upsample", "code2wav.decoder")) and _is_transposed(name):
        return weight.shape[0] * (1 if "upsample" in name else 2)  # channels, and the taps that meet in one output
    return weight[0].numel()


assert len(VOICE_TOKENS) + 4 <= TEXT_VOCAB
