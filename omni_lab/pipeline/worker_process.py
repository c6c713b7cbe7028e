"""The main program of one worker process. `ProcessExecutor` starts it; nobody else needs to."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import threading

import msgspec

from omni_lab.connectors.shared_memory import ChannelClosed, Receiver, Sender
from omni_lab.connectors.wire import Broken, Ready
from omni_lab.core import CLIENT
from omni_lab.engine.worker import Worker, peak_rss_bytes
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.build import build_worker


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    ends = json.loads(sys.argv[1])
    watch(ends["lifeline"])
    inboxes = {source: Receiver(memory, bell) for source, (memory, bell) in ends["inboxes"].items()}
    outboxes = {(stage, replica): Sender(memory, bell) for stage, replica, memory, bell in ends["outboxes"]}
    with selectors.DefaultSelector() as selector, contextlib.suppress(ChannelClosed):
        for inbox in inboxes.values():
            selector.register(inbox, selectors.EVENT_READ)
        plan = wait_for_start(inboxes[CLIENT], selector)
        try:
            worker = build_worker(plan, inboxes, outboxes)
        except Exception as error:
            outboxes[CLIENT, 0].send(Broken(plan.stage, plan.replica, f"{type(error).__name__}: {error}"))
            raise
        outboxes[CLIENT, 0].send(Ready(plan.stage, plan.replica, worker.facts | {"peak_rss_bytes": peak_rss_bytes()}))
        serve(worker, selector)


def serve(worker: Worker, selector: selectors.BaseSelector) -> None:
    """Turns while there is work; in between, sleep until a doorbell rings."""
    while not worker.stopped:
        if not worker.turn():
            selector.select()
    worker.close()


def wait_for_start(inbox: Receiver, selector: selectors.BaseSelector) -> StagePlan:
    while not (messages := inbox.receive()):
        selector.select()
    return msgspec.json.decode(messages[0].plan, type=StagePlan)


def watch(lifeline: int) -> None:
    """End this process at once when its parent is gone, whatever it is doing."""

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    main()
