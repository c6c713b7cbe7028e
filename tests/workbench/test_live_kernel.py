"""The live player in a real Jupyter kernel, driven by the messages that a view in a browser sends and gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

ROOT = Path(__file__).parents[2]


class Notebook:
    """A kernel, the traits of its one widget as its views know them, and the messages that they got."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager, self.client = manager, client
        self.widget, self.traits, self.sent, self.streams = "", {}, [], []

    def run(self, code: str) -> None:
        self.client.execute(code)
        status = self.client.get_shell_msg(timeout=60)["content"]
        assert status["status"] == "ok", status

    def do(self, **content: Any) -> None:
        """What a click in a view sends."""
        data = {"method": "custom", "content": content}
        message = self.client.session.msg("comm_msg", {"comm_id": self.widget, "data": data})
        self.client.shell_channel.send(message)

    def until(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        """Takes in what the kernel publishes until a condition holds."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, (self.traits, self.streams)
            if self.client.iopub_channel.msg_ready():
                self._take(self.client.get_iopub_msg(timeout=1))
            else:
                time.sleep(0.005)

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            self.streams.append(content["text"])
        data = content.get("data", {})
        if message["msg_type"] == "comm_open" and "prompt" in data.get("state", {}):
            self.widget, self.traits = content["comm_id"], dict(data["state"])
        elif message["msg_type"] == "comm_msg" and content["comm_id"] == self.widget:
            if data["method"] == "update":
                self.traits |= data["state"]
            elif data["method"] == "custom":
                self.sent.append((data["content"], [bytes(buffer) for buffer in message["buffers"]]))


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT))
    try:
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_speak_stop_and_shut_down(notebook: Notebook):
    notebook.run("from omni_lab.workbench.live import LivePlayer\nlive = LivePlayer('experiments/full.yaml')")
    notebook.until(lambda: notebook.traits.get("state") == "ready")
    assert notebook.traits["record"] is None

    notebook.do(say="Good morning.", speaker=None)
    notebook.until(lambda: notebook.traits["state"] == "speaking")
    notebook.until(lambda: notebook.traits["state"] == "ready")
    (begin, _), *chunks = [sent for sent in notebook.sent if "silence" not in sent[0]]
    assert begin == {"begin": 0} and all(content == {"chunk": 0} for content, _ in chunks)
    samples = np.concatenate([np.frombuffer(sound, "<f4") for _, (sound,) in chunks])
    assert len(samples) == sum(notebook.traits["record"]["audio_chunk_samples"]) > 10_000
    assert 0.05 < np.abs(samples).max() <= 1.0
    assert notebook.traits["answer"] and notebook.traits["record"]["e2el_ms"] > 0

    notebook.do(say="The quick brown fox jumps over the lazy dog. " * 4, speaker=None)
    notebook.until(lambda: any(content == {"chunk": 1} for content, _ in notebook.sent))
    notebook.run("1 + 1")  # the kernel's own thread is free
    assert notebook.traits["state"] == "speaking"
    notebook.do(stop=True)
    notebook.until(lambda: notebook.traits["status"] == "stopped")
    notebook.until(lambda: notebook.sent[-1][0] == {"silence": True})
    notebook.run("assert live.pipeline.requests == {}")

    notebook.do(say="", speaker=None)
    notebook.until(lambda: notebook.traits["error"] != "")
    assert "expected something to say" in notebook.traits["error"]

    notebook.do(say="Good morning.", speaker=None)
    notebook.until(lambda: notebook.traits["state"] == "speaking")
    notebook.manager.shutdown_kernel()
    assert not notebook.manager.is_alive()
    notebook.until(lambda: not notebook.client.iopub_channel.msg_ready())
    assert notebook.streams == []
