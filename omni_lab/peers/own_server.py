"""This project's own server as a target: the experiment's pipeline, asked over HTTP."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path

from omni_lab.experiment import Experiment
from omni_lab.peers.server_process import ServerProcess

STARTUP_S = 1800.0
"""Graphs may have to be compiled first."""


def command(experiment: Experiment, folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "omni_lab.serve", str(folder / f"{experiment.name}.yaml"), "--port", str(port)]


def described(experiment: Experiment, folder: Path) -> str:
    """What a run would do, for --dry-run; the port is a free one."""
    return shlex.join(command(experiment, folder, 0))


def prepare(experiment: Experiment, folder: Path) -> ServerProcess:
    """Writes the experiment into `folder`; the server that it is for, not started yet."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{experiment.name}.yaml"
    file.write_text(json.dumps(experiment.model_dump(mode="json", exclude={"sweep", "platforms"})), encoding="utf-8")
    port = _free_port()
    log = folder / f"{experiment.name}.log"
    return ServerProcess(command(experiment, folder, port), f"http://127.0.0.1:{port}", log, STARTUP_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
