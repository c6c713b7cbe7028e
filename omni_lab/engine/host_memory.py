"""How the C library gives freed memory back to the system."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


def keep_freed_memory(tensor_bytes: int = 32 << 20, total_bytes: int = 128 << 20) -> None:
    """Let this process reuse the memory of freed tensors of up to `tensor_bytes`, `total_bytes` in all.

    glibc returns large blocks to the system at once and the kernel clears them page by page when they are wanted
    again: for activations of megabytes that costs as much as computing them. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, tensor_bytes)
        mallopt(TRIM_THRESHOLD, total_bytes)
