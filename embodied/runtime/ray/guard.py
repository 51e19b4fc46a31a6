"""The parent of a host's process on a Ray node. It imports nothing of Ray or of this package.

It sets the host's cores before its first instruction, ends it when the driver or the node's Ray ends, kills its
remaining children, and writes down its exit code, which Ray does not report.
"""

import ctypes
import json
import os
import select
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(order, command):
    """`order`: cores (or empty), pid of the driver if it is on this machine, file and offset for the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when a run ends
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    exit_file = os.open(order["exit_file"], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts processes that leave the group
    guarded = [pid for pid in (order["driver"], os.getppid()) if pid]
    child = start(command)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child, signal.SIGKILL))
    wait_for_one_of([child, *guarded])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with its children; the process id is not reused before it is reaped
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_orphans()
    os.pwrite(exit_file, f"{code}\n".encode(), order["exit_at"])


def start(command):
    parent, libc = os.getpid(), ctypes.CDLL(None)
    pid = os.fork()
    if pid:
        with suppress(OSError):  # it is its own group leader already
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.execv(command[0], command)
    finally:
        os._exit(127)


def end_orphans():
    while orphans := open("/proc/thread-self/children").read().split():  # noqa: SIM115
        for pid in map(int, orphans):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait_for_one_of(pids):
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return
    while True:
        if poll.poll():
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
