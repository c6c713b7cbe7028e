"""The decoder layers that Thinker, Talker and code predictor share: attention with RoPE, dense MLP or experts.

A step of these small networks is bound by the number of operator calls, not by arithmetic, so projections are
fused, rotations, masks and cache lines are made once a step, and residuals are added inside the matrix products.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from omni_lab.models.qwen3_omni import fused
from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.invariance import INVARIANT_WINDOW, at_least
from omni_lab.models.qwen3_omni.mlp import DenseMLP, ExpertMLP
from omni_lab.models.qwen3_omni.rotary import LinearRotation, Rotary, Rotation, rotate
from omni_lab.models.qwen3_omni.spans import PackedSpans, PiecewiseSpans


class Decoder:
    """A stack of decoder layers with its final norm. The K/V cache is the caller's (see `engine/kv_cache.py`)."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        rotation: type[Rotation] = LinearRotation,
    ) -> None:
        self.config = config
        self.layers = [Layer(config, index, dtype, device) for index in range(config.layers)]
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, device)
        self.rotary = Rotary(config, dtype, device)
        self.rotation = rotation(self.rotary)
        self.seen_score = torch.zeros((), dtype=dtype, device=device)
        self.hidden_score = torch.full((), -math.inf, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        slots = {f"{prefix}norm.weight": self.norm.weight}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"{prefix}layers.{index}.")
        return slots

    def prepare(self) -> None:
        """Derive what the steps read from the loaded weights; call it once after loading."""
        self.norm.prepare()
        for layer in self.layers:
            layer.prepare()

    def prefill(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        spans: PiecewiseSpans | PackedSpans,
        cache: Any,
        capture: int | None = None,
        deepstack: tuple[torch.Tensor, list[torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed inputs [N, H] at rotary positions [3, N] -> (normed hidden state of each span's last token [S, H],
        captured hidden states [N, H] or None).

        Writes keys and values of each span to its cache row from position 0. `capture` k takes the input of
        layer k before the deepstack addition of layer k-1; the number of layers takes the normed output.
        `deepstack` (indices [M], vectors of each of the first layers [M, H]) is added to these layers' outputs.
        """
        if fused.is_fused(self):
            return fused.prefill(self, x, positions, spans, cache, capture)
        cos, sin = self.rotary.axes(positions)
        captured = None
        for index, layer in enumerate(self.layers):
            if index == capture == 0:
                captured = x
            qk, value = layer.project(x)
            x = layer.finish(x, spans.attend(rotate(qk, cos, sin), value, cache, index))
            if index + 1 == capture:
                captured = x
            if deepstack is not None and index < len(deepstack[1]):
                x = x.index_add(0, deepstack[0], deepstack[1][index].to(x.dtype))
        if capture == len(self.layers):
            captured = self.norm(x)
        return self.norm(x[spans.last]), captured

    def decode(
        self, x: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, cache: Any, end: int
    ) -> torch.Tensor:
        """One token for each of rows 0..B-1: inputs [B, H] at rotary positions [B] (or [B, 3], as the
        decoder's rotation wants them) -> normed hidden states [B, H].

        Row b writes its keys and values at position lengths[b] and attends to 0..lengths[b]; `end` bounds the
        positions that are read; the cache has a multiple of INVARIANT_WINDOW of them. A pure function of tensors
        for given B and `end`.
        """
        if fused.is_fused(self):
            return fused.decode(self, x, positions, lengths, cache)
        rows = x.shape[0]
        end += -end % INVARIANT_WINDOW
        rotation = self.rotation.at(positions)
        lines = cache.lines_at(lengths)
        windows = cache.window(rows, end)
        mask = self._mask(lengths, end)
        x = at_least(x)
        for layer, target, (keys, values) in zip(self.layers, cache.lines, windows, strict=True):
            qk, value = layer.project(x)
            query, key = torch.split_with_sizes(self.rotation.turn(qk[:rows], rotation), layer.sizes, 1)
            target.index_copy_(0, lines, torch.cat((key, value[:rows]), 1).view(-1, layer.head_dim))
            x = layer.finish(x, at_least(layer.attend(query, keys, values, mask)), alone=rows == 1)
        return self.norm(x)[:rows]

    def _mask(self, lengths: torch.Tensor, end: int) -> torch.Tensor:
        """Additive mask [B * kv_heads, 1, end]: 0 up to and at lengths[b], -inf beyond."""
        places = torch.arange(end, device=lengths.device)
        mask = torch.where(places > lengths.view(-1, 1, 1), self.hidden_score, self.seen_score)
        return mask.expand(self.config.kv_heads, -1, -1, -1).transpose(0, 1).reshape(-1, 1, end)


class Layer:
    """Weights and arithmetic of one decoder layer; tokens are rows [N, H], whatever sequence they belong to.

    Weights lie as [inputs, outputs], the layout in which products of few rows are fastest on the CPU.
    """

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.value_head = config.heads + config.kv_heads
        self.sizes = (config.heads, config.kv_heads)
        self.input_norm = RMSNorm((hidden,), eps, device)
        outputs = (self.value_head + config.kv_heads) * config.head_dim
        self.qkv = torch.empty(hidden, outputs, dtype=dtype, device=device)
        self.qk_norm = RMSNorm((2, config.head_dim), eps, device)
        self.out = torch.empty(config.heads * config.head_dim, hidden, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm((hidden,), eps, device)
        dense = not config.experts or index in config.dense_layers
        self.mlp = DenseMLP(config, dtype, device) if dense else ExpertMLP(config, dtype, device)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        query, key, value = self.qkv.t().split(sizes)
        return {
            f"{prefix}input_layernorm.weight": self.input_norm.weight,
            f"{prefix}self_attn.q_proj.weight": query,
            f"{prefix}self_attn.k_proj.weight": key,
            f"{prefix}self_attn.v_proj.weight": value,
            f"{prefix}self_attn.q_norm.weight": self.qk_norm.weight[0],
            f"{prefix}self_attn.k_norm.weight": self.qk_norm.weight[1],
            f"{prefix}self_attn.o_proj.weight": self.out.t(),
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
        } | self.mlp.slots(f"{prefix}mlp.")

    def prepare(self) -> None:
        self.input_norm.prepare()
        self.mlp_norm.prepare()
        self.qk_norm.prepare(torch.tensor([self.heads, self.kv_heads], device=self.qkv.device))
        self.qk_norm.scale[: self.heads] *= self.head_dim**-0.5  # the scale of attention scores, once and for all

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [N, heads + kv_heads, hd], normed but not yet rotated, and values [N, kv_heads, hd]."""
        qkv = torch.mm(self.input_norm(x), self.qkv).view(x.shape[0], -1, self.head_dim)
        return self.qk_norm(qkv[:, : self.value_head]), qkv[:, self.value_head :]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of one token for each row [B, heads, hd] to keys [B * kv_heads, hd, n] and values; [B, heads * hd].

        The query heads that share a key head are the rows of one matrix, so that no key is repeated. These rows are too
        few for a matrix product to be fast on a CPU: compiled, plain sums become loops with the softmax between them.
        """
        queries = query.reshape(keys.shape[0], -1, self.head_dim)
        if torch.compiler.is_compiling() and query.is_cpu:
            scores = (queries.unsqueeze(2) * keys.transpose(1, 2).unsqueeze(1)).sum(-1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            return (weights.unsqueeze(-1) * values.unsqueeze(1)).sum(2).view(query.shape[0], -1)
        scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
        return torch.bmm(torch.softmax(scores, -1), values).view(query.shape[0], -1)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, alone: bool = False) -> torch.Tensor:
        """Output projection and MLP, each with its residual. `alone` says that all rows are copies of one token."""
        x = torch.addmm(x, attended, self.out)
        return self.mlp(self.mlp_norm(x), x, alone)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of size n, in float32.

    It is computed as x / hypot(|x|, sqrt(n * eps)) * (sqrt(n) * weight), which is the same with four operator calls.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, device: torch.device | str) -> None:
        self.weight = torch.empty(shape, dtype=torch.float32, device=device)
        self.floor = torch.tensor(math.sqrt(shape[-1] * eps), dtype=torch.float32, device=device)

    def prepare(self, repeats: torch.Tensor | None = None) -> None:
        """`repeats` says how many heads use each row of a weight [rows, n]."""
        weight = self.weight if repeats is None else self.weight.repeat_interleave(repeats, 0)
        self.scale = weight * math.sqrt(weight.shape[-1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed = torch.div(x, torch.hypot(norm, self.floor)).mul_(self.scale)
        return normed if normed.dtype == x.dtype else normed.to(x.dtype)
