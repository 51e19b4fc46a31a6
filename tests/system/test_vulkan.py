"""The search for a Vulkan driver, and where its package comes from."""

import json
import os

import pytest

from embodied import vulkan
from embodied.core import vulkan_driver
from embodied.core.errors import EmbodiedError
from embodied.vulkan import Mirror, bookworm_mirror, read_mirror

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any driver, with an empty cache."""
    for name in vulkan_driver.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vulkan_driver, "SYSTEM_FOLDERS", (str(tmp_path / "icd.d"),))
    monkeypatch.setattr(vulkan_driver, "has_nvidia", lambda: False)
    (tmp_path / "icd.d").mkdir()
    return tmp_path


def describe(folder, name, library, version):
    (folder / "icd.d" / name).write_text(json.dumps({"ICD": {"library_path": library, "api_version": version}}))


def test_the_users_driver_comes_first_then_the_private_one_and_else_the_error_says_how_to_get_one(bare, monkeypatch):
    with pytest.raises(EmbodiedError, match=r"-m embodied\.vulkan"):
        vulkan_driver.ensure_vulkan()
    monkeypatch.setenv("VK_ICD_FILENAMES", "")
    vulkan_driver.private_icd().parent.mkdir(parents=True)
    vulkan_driver.private_icd().write_text("{}")
    vulkan_driver.ensure_vulkan()
    assert os.environ["VK_ICD_FILENAMES"] == str(vulkan_driver.private_icd())
    monkeypatch.setenv("VK_ICD_FILENAMES", "mine.json")
    vulkan_driver.ensure_vulkan()
    assert os.environ["VK_ICD_FILENAMES"] == "mine.json" and "mine.json" in vulkan.install()


def test_beside_a_graphics_card_cores_draw_with_a_software_driver_or_the_error_says_how_to_get_one(bare, monkeypatch):
    monkeypatch.setattr(vulkan_driver, "has_nvidia", lambda: True)
    monkeypatch.setattr(vulkan_driver, "loads", lambda library: True)
    vulkan_driver.ensure_vulkan()
    assert "VK_ICD_FILENAMES" not in os.environ
    with pytest.raises(EmbodiedError, match=r"-m embodied\.vulkan on_cores"):
        vulkan_driver.ensure_vulkan(on_cores=True)
    describe(bare, "lvp_icd.json", "libvulkan_lvp.so", "1.4.305")
    vulkan_driver.ensure_vulkan(on_cores=True)
    assert os.environ.pop("VK_ICD_FILENAMES") == str(bare / "icd.d" / "lvp_icd.json")


@pytest.mark.parametrize(
    ("library", "version"),
    [
        ("libm.so.6", "1.4.305"),  # a graphics card's driver, but no card
        ("liblvp.so", "1.4.305"),  # lavapipe, but it does not load
        ("/usr/lib/libvulkan_gfxstream.so", "1.4.305"),
        ("liblvp.so", "no number"),
    ],
)
def test_a_system_driver_that_cannot_work_is_passed_over(bare, monkeypatch, library, version):
    describe(bare, "x.json", library, version)
    monkeypatch.setattr(vulkan_driver, "DEVICES", bare / "no dev dri")
    assert not vulkan_driver.has_system_driver()


@pytest.mark.parametrize(("version", "usable"), [("1.3.230", False), ("1.3.274", True), ("1.4.305", True)])
def test_the_systems_lavapipe_counts_from_version_24_on(bare, monkeypatch, version, usable):
    monkeypatch.setattr(vulkan_driver, "loads", lambda library: True)
    describe(bare, "lvp_icd.json", "libvulkan_lvp.so", version)
    assert vulkan_driver.has_system_driver() is usable


def test_the_mirror_is_read_from_both_formats():
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    assert read_mirror(DEB822) == Mirror("http://mirror.example/debian", signed)
    assert read_mirror("# deb http://no bookworm main\ndeb  http://a.example/debian bookworm main contrib\n") == Mirror(
        "http://a.example/debian"
    )
    one_line = "deb [arch=amd64 signed-by=/k.gpg]  http://a.example/debian bookworm main"
    assert read_mirror(one_line) == Mirror("http://a.example/debian", "[arch=amd64 signed-by=/k.gpg] ")
    others = ["deb-src http://a bookworm main", "deb http://a bookworm-updates main", "deb http://a bookworm contrib"]
    others += [DEB822.replace("Types: deb\n", "Types: deb\nEnabled: no\n"), DEB822.replace("bookworm ", "trixie "), ""]
    assert [read_mirror(text) for text in others] == [None] * len(others)


def test_without_a_debian_mirror_the_error_says_so(tmp_path):
    with pytest.raises(EmbodiedError, match="names no mirror of Debian 12"):
        bookworm_mirror(tmp_path)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    assert bookworm_mirror(tmp_path).uri == "http://mirror.example/debian"
