"""Deadlines do not run while this process, or the driver it works for, is stopped."""

import os
import signal
import subprocess
import sys
import time

from embodied.runtime.heartbeat import GAP_S, AwakeClock, is_stopped, wait_awake


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
    real, asked = Clock(), []

    def attempt(seconds):
        asked.append(seconds)
        real.now += min(seconds, 0.25)

    assert not wait_awake(attempt, 1.25, clock=real)
    assert asked == [1.0, 1.0, 0.75, 0.5, 0.25] and real.now == 101.25, "it looks every second"
    assert not wait_awake(lambda seconds: False, 0)
    assert wait_awake(lambda seconds: True, 0)


def test_a_wait_lasts_while_the_driver_is_stopped():
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(driver.pid)
        os.kill(driver.pid, signal.SIGSTOP)
        while not is_stopped(driver.pid):
            time.sleep(0.01)
        real, tries = Clock(), []

        def attempt(seconds):
            tries.append(seconds)
            real.now += 0.5
            if len(tries) == 20:  # long after the deadline
                os.kill(driver.pid, signal.SIGCONT)
                while is_stopped(driver.pid):
                    time.sleep(0.01)

        assert not wait_awake(attempt, 2.0, driver.pid, real)
        assert len(tries) == 23, "the four tries of two seconds begin when it goes on"
    finally:
        driver.kill()
        driver.communicate()
    assert not is_stopped(driver.pid)
