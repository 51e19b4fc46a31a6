"""What threads ask of Ray when a run is over."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

# Every start of Ray is counted, and none takes place; in a process of its own, since others here are connected.
AFTER_THE_END = """
import ray
from ray._private import auto_init_hook
from ray.exceptions import RayError

from embodied.runtime.ray import nodes

calls = []
auto_init_hook.enable_auto_connect = True
ray.init = lambda **options: calls.append(options.get("address"))
nodes._connect("127.0.0.1:1", None)
assert calls == ["127.0.0.1:1"] and not ray.is_initialized(), calls
try:
    ray.get([])
except RayError:
    print("refused")
assert calls == ["127.0.0.1:1"], calls
"""


def test_who_asks_after_the_end_starts_no_cluster_of_rays_own():
    done = subprocess.run([sys.executable, "-c", AFTER_THE_END], capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr
