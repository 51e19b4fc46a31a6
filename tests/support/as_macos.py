"""Makes this process look like one on macOS (no affinity, no memfd, no /proc), then runs commands of `embodied.train`.

python as_macos.py "torch psutil" "recipe=sums_grpo --dry-run"  (libraries to import before)
"""

import fcntl
import importlib
import os
import platform
import sys
import sysconfig

LINUX_ALONE = ("/proc", "/sys", "/dev/shm")


def take_away():
    sysconfig.get_config_vars()  # read from a file named after the true system
    sys.platform, platform.system = "darwin", lambda: "Darwin"
    for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC"):
        delattr(os, name)
    del fcntl.F_OFD_SETLK
    stat = os.stat

    def stat_elsewhere(path, *arguments, **options):
        refuse("open", (path,))
        return stat(path, *arguments, **options)

    os.stat = stat_elsewhere
    sys.addaudithook(refuse)


def refuse(event, arguments):
    if event in ("open", "os.scandir", "os.listdir") and str(arguments[0]).startswith(LINUX_ALONE):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


if __name__ == "__main__":
    libraries, *commands = sys.argv[1:]
    for library in libraries.split():
        importlib.import_module(library)
    take_away()
    from embodied.train import main

    raise SystemExit(max([main(words.split()) for words in commands]))
