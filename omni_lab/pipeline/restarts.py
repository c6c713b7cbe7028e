"""When a worker that has ended is started anew."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_S, LONGEST_S = 0.2, 10.0
"""The rest before the first restart; it doubles with every further one up to the longest."""

WINDOW_S, MOST = 600.0, 8
"""A worker that ends more often than MOST times within WINDOW_S seconds is given up."""


@dataclass(slots=True)
class Restarts:
    """The times at which a worker has ended lately, in seconds of one clock."""

    ends: deque[float] = field(default_factory=deque)

    def rest(self, now: float) -> float | None:
        """The worker has ended now: seconds to wait before it is started anew; None gives it up."""
        self.ends.append(now)
        while self.ends[0] < now - WINDOW_S:
            self.ends.popleft()
        return None if len(self.ends) > MOST else min(LONGEST_S, FIRST_S * 2 ** (len(self.ends) - 1))
