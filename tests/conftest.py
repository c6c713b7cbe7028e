"""Fixtures that all tests share: the embedded checkpoints, and one computing thread so that sums are reproducible."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMNI_LAB_CACHE", os.path.join(os.path.dirname(__file__), "..", "build", "cache"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.environ["OMNI_LAB_CACHE"], "inductor"))

from pathlib import Path

import pytest
import torch

from omni_lab import zoo

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nano() -> Path:
    """Directory of the smallest checkpoint: random weights, every part of the model."""
    return zoo.path("nano")


@pytest.fixture(scope="session")
def voice() -> Path:
    """Directory of the checkpoint that speaks."""
    return zoo.path("voice")
