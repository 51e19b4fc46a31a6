"""Tests marked `gpu` run where there is an NVIDIA card, those of the bridge tasks where these tasks' files are: in the
folder that MS_ASSET_DIR names, or beside the checkout."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share

BESIDE = Path(__file__).parents[2] / "shared" / "assets"  # other people's files: read where they are, never copied
if (BESIDE / "data").is_dir():
    os.environ.setdefault("MS_ASSET_DIR", str(BESIDE))


def pytest_collection_finish():
    """What is imported by now stays to the end: nobody need look through it for garbage, time and again."""
    gc.collect()
    gc.freeze()


DRAWING = (  # files whose tests draw ManiSkill's scenes
    *("tests/envs/maniskill/", "tests/test_bridge_evaluation.py", "tests/test_images_page.py"),
    "tests/test_own_task_page.py",
)


def pytest_xdist_make_scheduler(config, log):
    """As --dist loadscope, a file at a time, but all that draw are one."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "drawing" if nodeid.startswith(DRAWING) else super()._split_scope(nodeid)

    return Files(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def kept_renderer():
    """The software driver compiles its shaders for seconds, once more whenever nobody held a renderer in between."""
    if Path("/dev/nvidiactl").exists():
        return None
    from embodied.system.vulkan_driver import ensure_vulkan

    ensure_vulkan()
    import sapien

    return sapien.render.RenderSystem(sapien.Device("cpu"))


@pytest.fixture(autouse=True)
def keep_renderer(request):
    if request.node.nodeid.startswith(DRAWING):
        request.getfixturevalue("kept_renderer")


def pytest_collection_modifyitems(items):
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
