"""The main program of one worker process. `ProcessExecutor` starts it; nobody else needs to."""

from __future__ import annotations

import contextlib
import gc
import json
import selectors
import sys

from omni_lab.pipeline.lifeline import watch

ENDS = json.loads(sys.argv[1])
watch(ENDS["lifeline"])  # before the imports, which take seconds

import msgspec  # noqa: E402

from omni_lab.connectors.shared_memory import ChannelClosed, Receiver, Sender  # noqa: E402
from omni_lab.connectors.wire import Broken, Ready  # noqa: E402
from omni_lab.core import CLIENT, PipelineError  # noqa: E402
from omni_lab.engine.worker import Worker, peak_rss_bytes  # noqa: E402
from omni_lab.families.plan import StagePlan  # noqa: E402
from omni_lab.pipeline.build import build_worker  # noqa: E402


def main() -> None:
    inboxes = {source: Receiver(memory, bell, watched=True) for source, (memory, bell) in ENDS["inboxes"].items()}
    outboxes = {(stage, replica): Sender(memory, bell) for stage, replica, memory, bell in ENDS["outboxes"]}
    with selectors.DefaultSelector() as selector, contextlib.suppress(ChannelClosed):
        for inbox in inboxes.values():
            selector.register(inbox, selectors.EVENT_READ)
        plan = wait_for_start(inboxes[CLIENT], selector)
        runtime = {"runtime_rss_bytes": peak_rss_bytes()}  # interpreter and libraries, before any weight is read
        try:
            worker = build_worker(plan, inboxes, outboxes)
            gc.freeze()  # what is loaded now stays: a collection in traffic need not walk through it
            facts = worker.facts | runtime | {"peak_rss_bytes": peak_rss_bytes()}
            outboxes[CLIENT, 0].send(Ready(plan.stage, plan.replica, facts))
            serve(worker, selector)
        except ChannelClosed:
            raise
        except Exception as error:
            expected = isinstance(error, PipelineError)  # the message says what to mend; a traceback would bury it
            cause = str(error) if expected else f"{type(error).__name__}: {error}"
            outboxes[CLIENT, 0].send(Broken(plan.stage, plan.replica, cause))
            if expected:
                sys.exit(1)
            raise


def serve(worker: Worker, selector: selectors.BaseSelector) -> None:
    """Turns while there is work; in between, sleep until a doorbell rings."""
    while not worker.stopped:
        if not worker.turn() and not worker.stopped:
            sleep(selector)
    worker.close()


def sleep(selector: selectors.BaseSelector) -> None:
    """Until a doorbell rings, or has rung since it was answered."""
    for key, _ in selector.select():
        key.fileobj.answer()


def wait_for_start(inbox: Receiver, selector: selectors.BaseSelector) -> StagePlan:
    while not (messages := inbox.receive()):
        sleep(selector)
    return msgspec.json.decode(messages[0].plan, type=StagePlan)


if __name__ == "__main__":
    main()
