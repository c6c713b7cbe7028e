"""How much arithmetic a step of each stage is, and how much memory it must read: the floor under its time.

Counted are the matrix products (convolutions and attention among them) and the weights and cache lines that they read.
Norms, activations and whatever lies between two products are not: a step that fuses perfectly pays nothing for them. No
row is padded, no frame decoded twice, no expert computed that was not chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omni_lab.models.qwen3_omni.code2wav import CONV_KERNEL, DILATIONS
from omni_lab.models.qwen3_omni.config import Code2WavConfig, DecoderConfig, TalkerConfig
from omni_lab.models.qwen3_omni.talker import SPECIAL_CODES


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-accumulates, and numbers read (weights once a step, cached keys and values once a row)."""

    macs: float
    numbers: float

    def __add__(self, other: Work) -> Work:
        return Work(self.macs + other.macs, self.numbers + other.numbers)


def thinker_step(config: DecoderConfig, rows: float, context: float) -> Work:
    """One text token for each of `rows` sequences that hold `context` positions."""
    return _decoder(config, rows, context) + _product(config.hidden_size, config.vocab_size, rows)


def talker_frame(config: TalkerConfig, rows: float, context: float) -> Work:
    """One codec frame for each of `rows` sequences: the code predictor's positions and heads, then one decoder step.

    The predictor's weights are counted as read once a frame, though each of its positions needs them.
    """
    predictor, groups = config.predictor, config.code_groups
    positions = [_decoder(predictor, rows, position) for position in range(groups)]
    residual = Work(sum(one.macs for one in positions), positions[0].numbers)
    heads = _product(predictor.hidden_size, predictor.vocab_size * (groups - 1), rows)
    head = _product(config.text.hidden_size, config.text.vocab_size - SPECIAL_CODES + 1, rows)
    return residual + heads + _decoder(config.text, rows, context) + head


def code2wav_frames(config: Code2WavConfig, frames: float) -> Work:
    """`frames` codec frames to samples, of however many sequences, in one pass."""
    size, steps = config.hidden_size, frames
    width = config.heads * config.head_dim
    layer = size * (2 * width + 2 * config.kv_heads * config.head_dim) + 3 * size * config.intermediate_size
    macs = config.layers * frames * (layer + 2 * width * config.sliding_window)
    weights = float(config.layers * layer)
    for ratio in config.upsampling_ratios:
        macs += steps * size * size * ratio
        steps *= ratio
        convnext = CONV_KERNEL * size + 8 * size * size
        macs += steps * convnext
        weights += size * size * ratio + convnext
    channels = config.decoder_dim
    first = CONV_KERNEL * size * channels
    macs += steps * first
    weights += first
    for rate in config.upsample_rates:
        upsample = channels * (channels // 2) * 2 * rate
        macs += steps * upsample
        steps *= rate
        channels //= 2
        units = len(DILATIONS) * (CONV_KERNEL + 1) * channels * channels
        macs += steps * units
        weights += upsample + units
    last = CONV_KERNEL * channels
    return Work(macs + steps * last, weights + last)


def _decoder(config: DecoderConfig, rows: float, context: float) -> Work:
    """One position for each row, after `context` others."""
    hidden, kv = config.hidden_size, config.kv_heads * config.head_dim
    width = config.heads * config.head_dim
    attention = Work(rows * 2 * width * (context + 1), rows * 2 * kv * context)
    work = Work(0, 0)
    for layer in range(config.layers):
        work += attention + _product(hidden, 2 * width + 2 * kv, rows)
        dense = not config.experts or layer in config.dense_layers
        work += _product(hidden, 3 * config.intermediate_size, rows) if dense else _experts(config, rows)
    return work


def _experts(config: DecoderConfig, rows: float) -> Work:
    """Router, chosen experts and shared expert. Read are the experts that `rows` even choices hit on average."""
    hidden, top_k = config.hidden_size, config.experts_per_token
    one = 3 * hidden * config.expert_size
    hit = config.experts * (1 - math.pow(1 - top_k / config.experts, rows))
    shared = 3 * hidden * config.shared_expert_size + (hidden if config.shared_expert_size else 0)
    return Work(rows * top_k * one, hit * one) + _product(hidden, config.experts, rows) + Work(rows * shared, shared)


def _product(inputs: int, outputs: int, rows: float) -> Work:
    return Work(rows * inputs * outputs, inputs * outputs)
