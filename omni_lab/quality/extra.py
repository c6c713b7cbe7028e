"""What is said where the packages that understand speech are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_quality() -> Iterator[None]:
    """For imports from the extra [quality]: raises an ImportError that says how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"word error rates need the extra [quality] ({error}): pip install 'omni-lab[quality]'"
        ) from error
