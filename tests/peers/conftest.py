"""These tests run the real vLLM-Omni out of an environment of its own (`make peers-test`), for minutes."""

from __future__ import annotations

import os

if "OMNI_LAB_PEERS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
