"""The decoder layers that Thinker, Talker and code predictor share: attention with RoPE, dense MLP or experts.

A step of these small networks is bound by the number of operator calls, not by arithmetic, so projections are
fused, rotations, masks and cache lines are made once a step, and residuals are added inside the matrix products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.invariance import INVARIANT_WINDOW, at_least
from omni_lab.models.qwen3_omni.mlp import DenseMLP, ExpertMLP

Span = tuple[int, int, int]
"""(row, start, stop): the sequence in cache row `row` owns packed positions start..stop of a prefill."""


class Decoder:
    """A stack of decoder layers with its final norm. The K/V cache is the caller's (see `engine/kv_cache.py`)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = config
        self.layers = [Layer(config, index, dtype, device) for index in range(config.layers)]
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, device)
        self.rotary = Rotary(config, dtype, device)
        self.places = torch.arange(0, device=device)
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
        spans: list[Span],
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
        cos, sin = self.rotary.axes(positions)
        captured = None
        for index, layer in enumerate(self.layers):
            if index == capture == 0:
                captured = x
            qk, value = layer.project(x)
            attended = layer.attend_spans(rotate(qk, cos, sin), value, spans, cache.keys[index], cache.values[index])
            x = layer.finish(x, attended)
            if index + 1 == capture:
                captured = x
            if deepstack is not None and index < len(deepstack[1]):
                x = x.index_add(0, deepstack[0], deepstack[1][index].to(x.dtype))
        last = torch.tensor([stop - 1 for _, _, stop in spans], device=x.device)
        if capture == len(self.layers):
            captured = self.norm(x)
        return self.norm(x[last]), captured

    def decode(
        self, x: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, cache: Any, end: int
    ) -> torch.Tensor:
        """One token for each of rows 0..B-1: inputs [B, H] at rotary positions [B] -> normed hidden states [B, H].

        Row b writes its keys and values at position lengths[b] and attends to 0..lengths[b]; `end` bounds the
        positions that are read; the cache has a multiple of INVARIANT_WINDOW of them. A pure function of tensors
        for given B and `end`.
        """
        rows = x.shape[0]
        end += -end % INVARIANT_WINDOW
        rotation = self.rotary.matrices(positions)
        lines = cache.lines_at(lengths)
        keys, values = cache.window(rows, end)
        mask = self._mask(lengths, end)
        x = at_least(x)
        for layer, target, seen_keys, seen_values in zip(self.layers, cache.lines, keys, values, strict=True):
            qk, value = layer.project(x)
            query, key = torch.split_with_sizes(torch.bmm(qk[:rows], rotation), layer.sizes, 1)
            target.index_copy_(0, lines, torch.cat((key, value[:rows]), 1).view(-1, layer.head_dim))
            x = layer.finish(x, at_least(layer.attend(query, seen_keys, seen_values, mask)), alone=rows == 1)
        return self.norm(x)[:rows]

    def _mask(self, lengths: torch.Tensor, end: int) -> torch.Tensor:
        """Additive mask [B * kv_heads, 1, end]: 0 up to and at lengths[b], -inf beyond."""
        device, kv_heads = lengths.device, self.config.kv_heads
        if self.places.shape[0] < end:
            self.places = torch.arange(2 * end, device=device)
        mask = torch.where(self.places[:end] > lengths.view(-1, 1, 1), self.hidden_score, self.seen_score)
        return mask.expand(kv_heads, -1, -1, -1).transpose(0, 1).reshape(-1, 1, end)


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

        The query heads that share a key head are the rows of one matrix, so that no key is repeated.
        """
        queries = query.reshape(keys.shape[0], -1, self.head_dim)
        scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
        return torch.bmm(torch.softmax(scores, -1), values).view(query.shape[0], -1)

    def attend_spans(
        self, qk: torch.Tensor, value: torch.Tensor, spans: list[Span], keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention inside each span [N, heads * hd]; keys and values of a span go to its cache row."""
        attended = torch.empty_like(qk[:, : self.heads])
        for row, start, stop in spans:
            q, k = qk[start:stop].transpose(0, 1).split(self.sizes)
            v = value[start:stop].transpose(0, 1)
            keys[row, :, : stop - start] = k
            values[row, :, : stop - start] = v
            result = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=1.0, enable_gqa=True
            )
            attended[start:stop] = result[0].transpose(0, 1)
        return attended.view(qk.shape[0], -1)

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


class Rotary:
    """Rotary position embedding of the half-split kind, with the interleaved axes of M-RoPE.

    Of the head_dim / 2 frequencies, those at 1, 4, 7, ... (mrope_section[1] of them) follow the height, those at
    2, 5, 8, ... (mrope_section[2]) the width, and all others the time axis (Qwen3-Omni technical report,
    arXiv 2509.17765; axes in the order of transformers' `modeling_qwen3_omni_moe.py`).
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        size = config.head_dim
        self.dtype = dtype
        self.frequencies = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
        self.both_halves = torch.cat((self.frequencies, self.frequencies))
        self.axis = torch.zeros(size // 2, dtype=torch.int64, device=device)
        for axis in (1, 2) if config.mrope_section else ():
            self.axis[axis : 3 * config.mrope_section[axis] : 3] = axis
        self.identity = torch.eye(size, device=device)
        self.quarter_turn = torch.eye(size, device=device).roll(size // 2, 1)
        self.quarter_turn[size // 2 :] *= -1

    def axes(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, 1, head_dim] at positions [3, N] (time, height, width)."""
        angles = positions.float()[self.axis].t() * self.frequencies
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def matrices(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations [B, head_dim, head_dim] at positions [B] that are equal on all axes: x @ matrix rotates x.

        For single tokens one product replaces the several calls of `rotate`.
        """
        angles = positions.float().view(-1, 1, 1) * self.both_halves
        return torch.addcmul(angles.cos() * self.identity, angles.sin(), self.quarter_turn).to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x2, x1) * sin for x [N, heads, head_dim] with halves (x1, x2)."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-second, first), -1), sin)
