"""Prompts packed one behind the other for one prefill: in pieces, or as tensors for a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int, int]
"""(row, start, stop): the prompt that goes to cache row `row` is packed positions start..stop."""


class PiecewiseSpans:
    """One prompt after the other, by torch's own attention. `last` [S] are the packed positions of their ends."""

    def __init__(self, spans: list[Span], device: torch.device | str = "cpu") -> None:
        self.spans = spans
        self.last = torch.tensor([stop - 1 for _, _, stop in spans], device=device)

    def attend(self, qk: Tensor, value: Tensor, cache: Any, layer: int) -> Tensor:
        """Causal attention inside each prompt: rotated queries and keys [N, heads + kv_heads, hd] and values
        [N, kv_heads, hd] -> [N, heads * hd]. Keys and values go to each prompt's cache row, from position 0 on."""
        heads = qk.shape[1] - value.shape[1]
        attended = torch.empty_like(qk[:, :heads])
        for row, start, stop in self.spans:
            q, k = qk[start:stop].transpose(0, 1).split((heads, value.shape[1]))
            v = value[start:stop].transpose(0, 1)
            keys, values = cache.row(layer, row)
            keys[:, : stop - start] = k
            values[:, : stop - start] = v
            result = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=1.0, enable_gqa=True
            )
            attended[start:stop] = result[0].transpose(0, 1)
        return attended.view(qk.shape[0], -1)


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """All prompts as tensors, so that a graph serves any number of them (models/qwen3_omni/fused.py).

    For each packed token: `starts` [N], where its prompt begins, and `rows` [N], its cache row. `last` [S] are the
    packed positions of each prompt's last token.
    """

    starts: Tensor
    rows: Tensor
    last: Tensor
