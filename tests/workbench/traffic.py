"""What widgets send to their page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from comm.base_comm import BaseComm
from jupyter_client.session import json_packer

from omni_lab.workbench.plot import Plot


def on_page(*plots: Plot) -> None:
    """What a page sends when it draws a plot: it wants the whole figure once, and from then on what changes."""
    for plot in plots:
        plot._handle_custom_msg({"whole": True}, [])


@contextmanager
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The size of every update that widgets send meanwhile, in bytes: JSON as the kernel packs it, and buffers."""
    sizes: list[int] = []

    def send(self: BaseComm, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        sizes.append(len(json_packer(data)) + sum(memoryview(one).nbytes for one in buffers or ()))

    with monkeypatch.context() as patch:
        patch.setattr(BaseComm, "send", send)
        yield sizes
