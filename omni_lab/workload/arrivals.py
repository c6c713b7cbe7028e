"""When requests are to be sent."""

from __future__ import annotations

import random
from itertools import accumulate


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests arrive: exponential gaps of mean 1 / `rate`, the first at 0."""
    draw = random.Random(seed)
    return list(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))
