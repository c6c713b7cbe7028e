"""Builds `nano`: transformers' Qwen3-Omni classes in the smallest configuration, with reproducible random weights."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import torch

from omni_lab.zoo import nano_tokenizer
from omni_lab.zoo.nano_config import GENERATION, NANO, PREPROCESSOR

SEED = 1234
WAVE_STD = 0.2


def build(directory: Path) -> None:
    """Write the whole checkpoint into `directory`, which exists: weights, configurations, tokenizer, chat template."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would warn about rope keys that its own configuration writes
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**copy.deepcopy(NANO))).eval()
    draw_weights(model)
    model.save_pretrained(directory)
    nano_tokenizer.save(nano_tokenizer.train(), directory)
    for name, content in (("generation_config.json", GENERATION), ("preprocessor_config.json", PREPROCESSOR)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Fill all parameters so that every part matters and greedy decisions are rarely near-ties.

    The initialisation of transformers would leave the talker's experts and routers at zero, LayerScale at 0.01 and
    the ConvNeXt scale at 1e-6, which hides errors. Here: 1/sqrt(fan-in), heads times 4, routers times 3.
    """
    bits = np.random.PCG64(SEED)
    for name, parameter in sorted(model.named_parameters()):
        mean, std = _moments(name, parameter)
        parameter.copy_(torch.from_numpy(_noise(bits, tuple(parameter.shape))) * std + mean)
    _calibrate(model.code2wav, bits)


def _noise(bits: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal float32 numbers that are the same bits on every machine: sums of four uniform integers.

    Normal draws of torch and numpy go through log and cosine, whose last bit depends on the processor.
    """
    sums = bits.random_raw(math.prod(shape)).view(np.uint16).reshape(-1, 4).astype(np.float32).sum(axis=1)
    mean, std = 2 * 65535.0, math.sqrt((65536.0**2 - 1) / 3)
    return ((sums - np.float32(mean)) / np.float32(std)).reshape(shape)


def _moments(name: str, parameter: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a parameter by its name in transformers' modules."""
    module, kind = name.split(".")[-2:]
    if kind == "gamma":  # ConvNeXt scale
        return 0.3, 0.05
    if name.endswith("layer_scale.scale"):
        return 0.5, 0.1
    if kind in ("alpha", "beta"):  # SnakeBeta
        return 0.0, 0.2
    if "norm" in module or "ln_" in module:
        return (1.0, 0.1) if kind == "weight" else (0.0, 0.05)
    if kind == "bias":
        return 0.0, 0.02
    if "code_embedding" in name:
        return 0.0, 2.0  # Code2Wav takes the mean of 16 of them
    if "embed" in name:
        return 0.0, 1.0
    if "experts" in name and parameter.ndim == 3:  # [experts, out, in]
        return 0.0, parameter.shape[-1] ** -0.5
    if parameter.ndim >= 3:
        # With residual branches at full strength the vocoder is chaotic: it would turn rounding into audible noise.
        gain = 0.4 if name.startswith("code2wav.") and ".conv2." in name else 1.0
        return 0.0, gain * _convolution_fan_in(name, parameter) ** -0.5
    gain = 4.0 if "lm_head" in name or "codec_head" in name else 3.0 if name.endswith("mlp.gate.weight") else 1.0
    return 0.0, gain * parameter.shape[-1] ** -0.5


def _convolution_fan_in(name: str, weight: torch.Tensor) -> int:
    if name.startswith("code2wav.upsample") and ".0.conv" in name:  # transposed, stride = kernel: one tap an output
        return weight.shape[0]
    if "block.1.conv" in name:  # transposed, kernel = 2 x stride: two taps an output
        return 2 * weight.shape[0]
    return weight[0].numel()


def _calibrate(code2wav: torch.nn.Module, bits: np.random.PCG64) -> None:
    """Scale the last convolution so that the waveform has mean 0 and a standard deviation of 0.2: no clipping.

    The factors are rounded to two digits, so that they do not depend on the machine's float rounding.
    """
    codes = torch.from_numpy(bits.random_raw(16 * 24) % code2wav.config.codebook_size).to(torch.int64)
    output: list[torch.Tensor] = []
    last = code2wav.decoder[-1]
    hook = last.register_forward_hook(lambda module, inputs, result: output.append(result))
    code2wav(codes.view(1, 16, 24))
    hook.remove()
    wave = output[0] - last.conv.bias
    scale = float(f"{WAVE_STD / wave.std().item():.2g}")
    last.conv.weight.mul_(scale)
    last.conv.bias.fill_(float(f"{-scale * wave.mean().item():.2g}"))
