"""The GPU that a simulator draws on is found among EGL's devices by its file, not by CUDA's number."""

import os

import pytest

from embodied.core.vulkan_driver import loads
from embodied.envs.mujoco import rendering
from embodied.envs.mujoco.rendering import choose_card

HYBRID = ["renderD128", "renderD131", "renderD130", "renderD129", ""]  # another maker's first, software last


@pytest.mark.parametrize(
    ("devices", "place", "wanted", "chosen"),
    [
        (HYBRID, "1", "renderD130", "2"),
        (HYBRID, "0", "renderD129", "3"),
        ([("", None), ("", 0), ("", None)], "6", "", "1"),  # a container without files: CUDA shows one card
        (["", "", ""], "1", "renderD130", "1"),  # a driver that names no files: NVIDIA's come first, by PCI
        (HYBRID, "1", "", "1"),
        ([""], "6", "renderD134", None),  # a container without the driver's graphics part
        (HYBRID, None, "", None),
    ],
)
def test_the_gpu_that_draws_is_found_by_its_render_file_or_by_the_gpus_that_cuda_shows(
    devices, place, wanted, chosen, monkeypatch, capsys
):
    table = [(device, None) if isinstance(device, str) else device for device in devices]
    monkeypatch.setattr(rendering, "egl_devices", lambda: table)
    for key, value in {rendering.CHOICE: place, "EMBODIED_RENDER_FILE": wanted}.items():
        monkeypatch.setenv(key, value or "")
        if value is None:
            monkeypatch.delenv(key)
    choose_card()
    assert os.environ.get(rendering.CHOICE) == chosen
    assert ("EGL has no device 6 (renderD134)" in capsys.readouterr().err) == (chosen is None and place is not None)


@pytest.mark.skipif(not loads("libEGL.so.1"), reason="needs EGL")
def test_egl_is_asked_for_its_devices():
    devices = rendering.egl_devices()
    assert all(file == "" or file.startswith("renderD") for file, _ in devices)
    assert all(number is None or number >= 0 for _, number in devices)
