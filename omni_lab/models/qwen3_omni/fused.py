"""The decoders by kernels: what a compiled graph of float32 tensors on the CPU calls in the place of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omni_lab.kernels import ops
from omni_lab.kernels.ops import WIDEST, has_kernel
from omni_lab.models.qwen3_omni.mlp import DenseMLP
from omni_lab.models.qwen3_omni.spans import PackedSpans

if TYPE_CHECKING:
    from omni_lab.engine.sampler import ResidualPick
    from omni_lab.models.qwen3_omni.code_predictor import CodePredictor
    from omni_lab.models.qwen3_omni.decoder import Decoder, Layer


def is_fused(decoder: Decoder) -> bool:
    """Whether a decoder runs by kernels: while it is compiled, if it can."""
    return torch.compiler.is_compiling() and fits(decoder)


def fits(decoder: Decoder) -> bool:
    """Whether there are kernels for a decoder: all of its widths are whole vectors."""
    layers = decoder.layers
    widths = [layers[0].qkv.shape[0], layers[0].head_dim, *(layer.mlp.down.shape[-2] for layer in layers)]
    widths += [layer.mlp.shared_down.shape[0] for layer in layers if not isinstance(layer.mlp, DenseMLP)]
    return has_kernel(layers[0].qkv) and not any(width % WIDEST for width in widths)


def prefill(
    decoder: Decoder, x: Tensor, positions: Tensor, spans: PackedSpans, cache: Any, capture: int | None
) -> tuple[Tensor, Tensor | None]:
    """See `Decoder.prefill`."""
    turns = _turns(decoder, positions)
    lines = cache.lines_of(spans.rows, torch.arange(x.shape[0]) - spans.starts)
    inputs = []
    for layer, memory in zip(decoder.layers, cache.lines, strict=True):
        inputs.append(x)
        heads = _project(decoder, layer, x, turns, memory, lines)
        x = _finish(decoder, layer, x, ops.span_attention(heads, layer.kv_heads, spans.starts))
    inputs.append(decoder.norm(x))
    return decoder.norm(x[spans.last]), None if capture is None else inputs[capture]


def decode(decoder: Decoder, x: Tensor, positions: Tensor, lengths: Tensor, cache: Any) -> Tensor:
    """See `Decoder.decode`; each row reads the positions that it has, no window."""
    turns = _turns(decoder, positions.view(x.shape[0], -1).expand(-1, 3).t())
    lines, first_lines = cache.lines_at(lengths), cache.first_lines[: x.shape[0]]
    for layer, memory in zip(decoder.layers, cache.lines, strict=True):
        heads = _project(decoder, layer, x, turns, memory, lines)
        x = _finish(decoder, layer, x, ops.row_attention(heads, memory, first_lines, lengths))
    return decoder.norm(x)


def predict(predictor: CodePredictor, hidden: Tensor, embed0: Tensor, pick: ResidualPick) -> tuple[Tensor, Tensor]:
    """See `CodePredictor.predict`."""
    decoder, groups = predictor.decoder, predictor.groups
    weights = []
    for layer in decoder.layers:
        weights += [layer.input_norm.scale, layer.qkv, layer.qk_norm.scale]
        weights += [layer.out, layer.mlp_norm.scale, layer.mlp.gate_up, layer.mlp.down]
    heads = decoder.norm.scale, predictor.embedding, predictor.head
    uniforms = pick.draws(hidden.shape[0], groups)
    eps = decoder.config.rms_norm_eps
    return ops.predict_codes(hidden, embed0, *predictor.turns, weights, *heads, uniforms, eps, pick.top_k, pick.top_p)


def _turns(decoder: Decoder, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, hd] at positions [3, N]."""
    cos, sin = decoder.rotary.axes(positions)
    return cos[:, 0], sin[:, 0]


def _project(
    decoder: Decoder, layer: Layer, x: Tensor, turns: tuple[Tensor, Tensor], memory: Tensor, lines: Tensor
) -> Tensor:
    """Heads [N, heads + 2 * kv_heads, hd] of a layer, whose keys and values are written to `lines` of the cache."""
    eps = decoder.config.rms_norm_eps
    heads = ops.project_heads(x, layer.input_norm.scale, layer.qkv, layer.qk_norm.scale, *turns, eps)
    memory.index_copy_(0, lines, heads[:, layer.heads :].flatten(0, 1))
    return heads


def _finish(decoder: Decoder, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """The output of a layer [N, H]."""
    mlp, eps = layer.mlp, decoder.config.rms_norm_eps
    front = layer.out, layer.mlp_norm.scale
    if isinstance(mlp, DenseMLP):
        return ops.finish_dense(x, attended, *front, mlp.gate_up, mlp.down, eps)
    experts = mlp.front, mlp.gate_up, mlp.down, mlp.shared_down
    return ops.finish_experts(x, attended, *front, *experts, mlp.top_k, mlp.norm_topk, eps)
