"""The benchmarks are not installed: they run from the root of the checkout, and so do their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
