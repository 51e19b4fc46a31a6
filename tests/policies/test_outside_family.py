"""A family of an installed package: named like ours, and its published folders are recognised."""

import json
import os
import subprocess
import sys

import pytest

from embodied.policies.config import outside_families
from embodied.policies.smolvla.policy import TINY

OPTIONS = """
from typing import Literal
from pydantic import Field
from embodied.policies.smolvla.config import SmolVLAConfig

class LargeVLAConfig(SmolVLAConfig):
    policy = "large_vla.policy:LargeVLA"
    name: Literal["large_vla"] = Field(description="Another one.")
    extra: int = Field(3, description="Its own option.")

    @classmethod
    def recognise(cls, folder):
        return "large_vla" if folder.config.get("type") == "large_vla" else None
"""
POLICY = """
from embodied.policies.smolvla.policy import SmolVLAPolicy

class LargeVLA(SmolVLAPolicy):
    pass
"""
USED = """
import sys
from pathlib import Path
from embodied import train
from embodied.policies import policy_class
from embodied.policies.policy_folder import families_of
print(families_of(Path(sys.argv[1])), policy_class("large_vla").__name__)
told = ["recipe=pointmass_ppo_pi0_tiny", "policy.name=large_vla", "policy.extra=4", "--cfg"]
raise SystemExit(train.main(told))
"""


def test_an_installed_package_adds_a_family(tmp_path):
    package, about = tmp_path / "large_vla", tmp_path / "large_vla-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text(OPTIONS)
    (package / "policy.py").write_text(POLICY)
    (package / "leaves.py").write_text("raise SystemExit(3)\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: large-vla\nVersion: 1.0\n")
    lines = ["[embodied.families]", "large_vla = large_vla.config:LargeVLAConfig"]
    lines += ["broken = large_vla.nowhere:Nothing", "leaves = large_vla.leaves:Nothing"]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(TINY | {"type": "large_vla"}))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "default", "-c", USED, str(tmp_path / "folder")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "('large_vla',) LargeVLA" in done.stdout and "extra: 4" in done.stdout
    assert "policy.name=broken is missing: importing large_vla.nowhere:Nothing failed" in done.stderr
    assert "policy.name=leaves is missing: importing large_vla.leaves:Nothing failed: 3" in done.stderr


@pytest.mark.parametrize(
    ("content", "told"), [(b"\xff", ""), (b"[embodied.families]\n\xff = a:b", "are missing: Unic")]
)
def test_a_package_with_a_damaged_list_of_entry_points_stops_nothing(tmp_path, monkeypatch, recwarn, content, told):
    about = tmp_path / "another-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (about / "entry_points.txt").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert outside_families() == {}
    assert told in " ".join(str(warning.message) for warning in recwarn)
