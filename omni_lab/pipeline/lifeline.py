"""A child process ends when its parent does, however the parent ends."""

from __future__ import annotations

import os
import threading


def watch(lifeline: int) -> None:
    """End this process at once when its parent is gone, whatever it is doing.

    `lifeline` is the reading end of a pipe whose other end the parent alone holds open.
    """

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
