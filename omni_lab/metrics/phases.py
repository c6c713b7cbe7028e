"""What a worker may be doing: the phases that the step clock tells apart, and that a gap is made of."""

from __future__ import annotations

WAITS = ("idle", "input", "slot")
"""idle: there is no request, or the profiler has the thread. input: requests are there, and none has the input for its
next step. slot: there is no room in the output path, or, with the inline executor, other stages have the thread."""

STEP = ("prepare", "forward", "sample")
"""The step itself, until its result is on the host. Where the network has a process of its own, forward is the call."""

HOST = ("schedule", "payload", "send", "other")
"""schedule: taking in messages and choosing the batch. payload, send: building and sending what the step made.
other: the rest."""

PHASES = (*WAITS, "schedule", *STEP, "payload", "send", "other")
"""All phases in the order of a turn."""

CAUSES = ("input", "slot", *HOST)
"""What a gap is made of. A worker without a request has no gap, so idle is no cause."""
