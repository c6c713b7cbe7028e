"""The background loop: results, errors and cancellation from another thread, and an end without noise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError, Future

import pytest

from omni_lab.workbench.loop import BackgroundLoop, background


@pytest.fixture
def loop():
    loop = BackgroundLoop()
    yield loop
    loop.close()


async def value_of(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def fails() -> None:
    raise KeyError("lost")


class Guest:
    """A coroutine that stays until it is cancelled, and then takes its time to clean up."""

    def __init__(self) -> None:
        self.came, self.left = threading.Event(), False

    async def stay(self) -> None:
        self.came.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.left = True


def test_results_and_errors_reach_the_future(loop: BackgroundLoop):
    future = loop.submit(value_of(7))
    assert isinstance(future, Future)
    assert future.result(5) == 7
    with pytest.raises(KeyError, match="lost"):
        loop.submit(fails()).result(5)


def test_coroutines_share_one_thread_that_is_not_the_callers(loop: BackgroundLoop):
    async def here() -> int:
        return threading.get_ident()

    assert {loop.submit(here()).result(5) for _ in range(3)} == {loop.thread.ident} != {threading.get_ident()}


def test_cancel_waits_for_the_clean_up(loop: BackgroundLoop):
    guest = Guest()
    future = loop.submit(guest.stay())
    guest.came.wait(5)
    assert future.cancel()
    assert guest.left and future.cancelled()
    with pytest.raises(CancelledError):
        future.result()
    assert future.cancel(), "twice is once"


def test_what_has_ended_is_not_cancelled(loop: BackgroundLoop):
    future = loop.submit(value_of("whole"))
    assert future.result(5) == "whole"
    assert not future.cancel()
    assert future.result() == "whole"


def test_a_coroutine_that_ends_by_itself_when_cancelled_has_a_result(loop: BackgroundLoop):
    came = threading.Event()

    async def stubborn() -> str:
        came.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "kept"

    future = loop.submit(stubborn())
    came.wait(5)
    assert not future.cancel()
    assert future.result() == "kept"


def test_a_coroutine_may_cancel_another(loop: BackgroundLoop):
    guest = Guest()
    future = loop.submit(guest.stay())
    guest.came.wait(5)

    async def cancels() -> bool:
        return future.cancel()

    assert not loop.submit(cancels()).result(5), "on the loop's own thread it does not wait"
    with pytest.raises(CancelledError):
        future.result(5)
    assert guest.left


def test_it_runs_beside_the_callers_loop(loop: BackgroundLoop):
    async def main() -> object:
        return await asyncio.wrap_future(loop.submit(value_of("beside")))

    assert asyncio.run(main()) == "beside"


def test_closing_cancels_and_waits(loop: BackgroundLoop):
    guest = Guest()
    future = loop.submit(guest.stay())
    guest.came.wait(5)
    loop.close()
    assert guest.left and future.cancelled() and not loop.thread.is_alive()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(value_of(1))


def test_one_loop_for_the_process():
    first = background()
    assert background() is first
    first.close()
    assert background() is not first


def test_the_process_ends_cleanly():
    """What still runs at the end is cleaned up, a child process included, and nothing complains."""
    script = """
        import asyncio, threading
        from omni_lab.workbench.loop import background

        started = threading.Event()

        async def child():
            process = await asyncio.create_subprocess_exec("sleep", "60")
            started.set()
            try:
                await process.wait()
            finally:
                process.kill()
                print(await process.wait())

        background().submit(child())
        background().submit(asyncio.to_thread(started.wait)).result()
    """
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "-9\n"
