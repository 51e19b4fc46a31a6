"""Every Python process that finds this module on PYTHONPATH imports it: it records which lines of ours run.

`benchmarks.house` sets the variables. The first byte of the shared file is 0, then 1 while lines are recorded, then 2:
every process writes what it recorded, and which modules it has imported, into the folder. Nothing in the product knows
of this; a process that is forked from a traced one is traced, too.
"""

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

CODE = os.environ["TRACED_CODE"]  # a folder, with its last slash
FOLDER = Path(os.environ["TRACE_FOLDER"])
PAUSE_S = 0.01

with open(FOLDER / "moment", "rb") as file:
    moment = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
lines = set()


def trace_call(frame, event, arg):
    return trace_line if frame.f_code.co_filename.startswith(CODE) else None


def trace_line(frame, event, arg):
    if event == "line" and moment[0] == 1:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
    return trace_line


def write_at_the_end():
    while moment[0] < 2:
        time.sleep(PAUSE_S)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    traced = {
        "name": Path("/proc/self/comm").read_text().strip(),
        "lines": sorted(lines.copy()),
        "modules": sorted({name for name in files if name and name.startswith(CODE)}),
    }
    draft = FOLDER / f"{os.getpid()}.draft"
    draft.write_text(json.dumps(traced))
    draft.replace(draft.with_suffix(".json"))


def watch():
    threading.Thread(target=write_at_the_end, daemon=True).start()


os.register_at_fork(after_in_child=watch)
watch()
if os.environ["TRACE_LINES"] == "True":
    threading.settrace(trace_call)  # every later thread
    sys.settrace(trace_call)
