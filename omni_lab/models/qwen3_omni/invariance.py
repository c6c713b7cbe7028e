"""Batch invariance: a row of a matrix product is the same to the bit, whatever rows are beside it.

Matrix products of few rows go through kernels that add in another order (measured with MKL on AVX2: below four
rows; from four on, no row depends on how many there are). So products are filled up to four rows, and a request
that samples, or that has two logits very close together, gets the same answer alone and in company.
"""

from __future__ import annotations

import torch

INVARIANT_ROWS = 4
INVARIANT_WINDOW = 32
"""Attention reads a multiple of so many positions, masked ones included: where a vector loop ends in single numbers
depends on the length, and with it the order of a sum."""


def at_least(x: torch.Tensor) -> torch.Tensor:
    """`x` with at least INVARIANT_ROWS rows: what is missing are copies of row 0 (if there is one).

    A captured step leaves this to whoever fills its batch.
    """
    if torch.compiler.is_compiling():
        return x
    missing = INVARIANT_ROWS - x.shape[0]
    return x if missing <= 0 or missing == INVARIANT_ROWS else torch.cat((x, x[:1].expand(missing, *x.shape[1:])))


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, H] times weight [H, V] -> [B, V], each row the same in any batch."""
    return torch.mm(at_least(x), weight)[: x.shape[0]]
