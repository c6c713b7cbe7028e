"""What a run's audio sounds like, heard by machine: words, loudness, clicks at chunk edges (docs/quality.md)."""

from __future__ import annotations

from omni_lab.quality.summary import by_configuration
from omni_lab.quality.table import FILE, hear, measure, write
from omni_lab.quality.words import DEFINITIONS, Definition

__all__ = ["DEFINITIONS", "FILE", "Definition", "by_configuration", "hear", "measure", "write"]
