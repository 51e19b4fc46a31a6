"""Deadlines do not run while this process, or the driver it works for, is stopped."""

import os
import signal
import subprocess
import sys
import time

from embodied.runtime.awake_clock import GAP_S, AwakeClock, is_stopped, wait_awake


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_time_counts_between_looks_and_not_in_a_gap():
    real = Clock()
    clock = AwakeClock(real)
    start = clock()
    for _ in range(3):
        real.now += 1
        clock()
    assert clock() - start == 3 and clock.awake_s() == 3
    real.now += 600  # stopped: nobody looked
    assert clock() - start == 3
    assert clock.awake_s() == 0, "silence of others counts from here on"
    real.now += GAP_S
    assert clock() - start == 3 + GAP_S and clock.awake_s() == GAP_S


def test_a_wait_ends_after_its_seconds_and_not_before():
    asked = []

    def attempt(seconds):
        asked.append(seconds)
        time.sleep(min(seconds, 0.01))

    assert not wait_awake(attempt, 0.05) and len(asked) >= 5 and max(asked) <= 0.05
    assert not wait_awake(lambda seconds: False, 0)
    assert wait_awake(lambda seconds: True, 0)


def test_a_wait_lasts_while_the_driver_is_stopped():
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(driver.pid)
        os.kill(driver.pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while not is_stopped(driver.pid) and time.monotonic() < until:
            time.sleep(0.01)
        tries = []

        def attempt(seconds):
            tries.append(seconds)
            time.sleep(min(seconds, 0.02))
            if len(tries) == 20:  # long after the deadline
                os.kill(driver.pid, signal.SIGCONT)

        assert not wait_awake(attempt, 0.1, driver.pid)
        assert len(tries) > 20
    finally:
        driver.kill()
        driver.communicate()
    assert not is_stopped(driver.pid)
