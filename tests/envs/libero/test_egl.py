"""The GPU that a simulator draws on is found among EGL's devices by its file, not by CUDA's number."""

import os

import pytest

from embodied.envs.libero import images
from embodied.envs.libero.images import choose_card
from embodied.system.vulkan_driver import loads

HYBRID = ["renderD128", "renderD131", "renderD130", "renderD129", ""]  # another maker's first, software last


@pytest.mark.parametrize(
    ("files", "place", "wanted", "chosen"),
    [
        (HYBRID, "1", "renderD130", "2"),
        (HYBRID, "0", "renderD129", "3"),
        (["", "", ""], "1", "renderD130", "1"),  # a driver that names no files: NVIDIA's come first, by PCI
        (HYBRID, "1", "", "1"),
        ([""], "6", "renderD134", None),  # a container without the driver's graphics part
        (HYBRID, None, "", None),
    ],
)
def test_the_card_is_found_by_its_file(files, place, wanted, chosen, monkeypatch, capsys):
    monkeypatch.setattr(images, "render_files", lambda: files)
    for key, value in {images.CHOICE: place, "EMBODIED_RENDER_FILE": wanted}.items():
        monkeypatch.setenv(key, value or "")
        if value is None:
            monkeypatch.delenv(key)
    choose_card()
    assert os.environ.get(images.CHOICE) == chosen
    assert ("EGL has no device 6 (renderD134)" in capsys.readouterr().err) == (place == "6")


@pytest.mark.skipif(not loads("libEGL.so.1"), reason="needs EGL")
def test_egl_is_asked_for_its_devices():
    files = images.render_files()
    assert all(file == "" or file.startswith("renderD") for file in files)
