"""`python -m omni_lab.serve EXPERIMENT.yaml`: serves an experiment's pipeline to OpenAI-compatible clients."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import uvicorn

from omni_lab.command import DONE, FAILED, WRONG, Parser
from omni_lab.core import PipelineError
from omni_lab.experiment import ExperimentError, load_experiment
from omni_lab.server.app import build_app
from omni_lab.server.service import Service

KEY = "OMNI_LAB_API_KEY"
"""Environment variable with the key that clients have to send; unset, none is asked for."""

ENDING_S = 2
"""Beyond `drain_s` the pipeline has ended its requests; so long their clients can still be told."""

SEND_BUFFER = 1 << 16
"""Bytes of one connection that the system keeps for a client that does not read: a second of streamed speech."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = Parser(prog="omni_lab.serve", description=__doc__)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT.yaml")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8091, help="0 for any free one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="dotted key and YAML value, laid over the file"
    )
    options = parser.parse_args(argv)
    try:
        experiment = load_experiment(options.experiment, options.set)
        if experiment.sweep:
            raise ExperimentError(f"{options.experiment}: sweep: expected one configuration; serve a rung's own file")
        listener = listen(options.host, options.port, experiment.server.slow_reader_s)
    except (ExperimentError, OSError, OverflowError) as error:
        print(f"{error}" if isinstance(error, ExperimentError) else f"--host, --port: {error}", file=sys.stderr)
        return WRONG
    service = Service(experiment)
    server = make_server(service, os.environ.get(KEY))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # the first lets requests finish, a second SIGINT does not
    try:
        asyncio.run(serve(service, server, listener))
    except PipelineError as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return DONE


class Server(uvicorn.Server):
    """uvicorn's own would end the process by the signal that it got, and cut answers before the pipeline is closed."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The pipeline ends what is still at work after `drain_s`, so that the clients are told."""
        draining = asyncio.create_task(self.service.drain())
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def listen(host: str, port: int, slow_reader_s: float) -> socket.socket:
    """A listening socket. The system drops connections whose other end takes nothing for much too long."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a small event waits 40 ms for the one before
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(slow_reader_s * 2000))
    return listener


def make_server(service: Service, key: str | None) -> Server:
    """The server of a service; `key` as in `build_app`."""
    config = uvicorn.Config(
        build_app(service, key),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(service.limits.drain_s + ENDING_S),
    )
    return Server(config, service)


async def serve(service: Service, server: Server, listener: socket.socket) -> None:
    """Answers at once, with 503 until the pipeline runs, until `server.should_exit`; then running requests may end.

    Raises PipelineError if the pipeline cannot start.
    """
    host, port = listener.getsockname()[:2]
    _say(f"listening at http://{host}:{port}, loading {service.model}")
    answering = asyncio.create_task(server.serve([listener]))
    running = asyncio.create_task(_run(service, answering, f"http://{host}:{port}"))
    await asyncio.wait({answering, running}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if service.pipeline is None:
        running.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(answering, running)


async def _run(service: Service, answering: asyncio.Task, address: str) -> None:
    began = time.monotonic()
    async with service.running(_say):
        _say(f"ready after {time.monotonic() - began:.1f} s: {address}")
        await asyncio.wait({answering})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
