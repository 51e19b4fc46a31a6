"""What `embodied.reporting` offers is there, and costs nothing before it is used."""

import subprocess
import sys

import pytest

from embodied import reporting


@pytest.mark.parametrize("name", reporting.__all__)
def test_a_public_name_is_there(name):
    assert getattr(reporting, name).__name__ == name


def test_the_package_itself_imports_no_page():
    code = "import sys, embodied.reporting; print([name for name in sys.modules if 'reporting.' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'film'"):
        _ = reporting.film
