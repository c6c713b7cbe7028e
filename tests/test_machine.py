"""What other programs use of the machine is told apart from what this one uses."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from omni_lab.workload.machine import Reading, others_share

SPIN = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\ninput()"


def test_work_of_this_program_and_its_children_is_its_own() -> None:
    before = Reading()
    child = subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE)
    end = time.process_time() + 0.4
    while time.process_time() < end or sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.3:
        pass
    after = Reading()
    child.communicate(b"\n")
    assert after.own_s - before.own_s >= 0.7


def test_the_rest_is_that_of_others() -> None:
    processors = psutil.cpu_count()
    before = Reading(at_s=10.0, all_s=100.0, own_s=50.0)
    assert others_share(before, Reading(at_s=12.0, all_s=103.0, own_s=52.0)) == 1.0 / (2 * processors)
    assert others_share(before, Reading(at_s=12.0, all_s=101.0, own_s=52.0)) == 0.0
