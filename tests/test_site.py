"""The site of the pages is built without a warning, by which links and anchors are checked, too."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from pages import ROOT

from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("mkdocstrings") is None, reason="mkdocs is not installed")
def test_the_site_is_built_with_every_option_and_public_name(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet, timeout=600)
    assert done.returncode == 0, done.stderr
    options = (tmp_path / "site" / "options.html").read_text()
    assert {key for key, _, _ in leaves(root(RunConfig))} == {*re.findall(r"<td><code>([\w.]+)</code>", options)}
    api = (tmp_path / "site" / "python.html").read_text()
    import embodied

    assert all(f'id="embodied.{name}' in api or f".{name}" in api for name in embodied.__all__)
    assert "Collocated" in (tmp_path / "site" / "search" / "search_index.json").read_text()


def test_the_site_lists_every_page():
    listed = {*re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])}
    made = {"index.md", "examples.md", "options.md", "python.md", "changelog.md", "contributing.md"}
    assert listed == made | {path.name for path in (ROOT / "docs").glob("*.md")}
