"""Attention over a packed sequence: blocks of tokens, one behind the other, that see only themselves."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Bidirectional attention [N, heads, head_dim] -> [N, heads * head_dim] within blocks of `lengths` tokens.

    Neighbouring blocks of one length (the frames of a video, the full windows of a recording) go as one batch.
    """
    outputs = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        stop = start + count * length
        blocks = (part[start:stop].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(*blocks).transpose(1, 2).flatten(2).flatten(0, 1))
        start = stop
    return torch.cat(outputs)
