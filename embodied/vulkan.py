"""Put a Vulkan driver into the user's cache folder where the machine has none: python -m embodied.vulkan"""

from __future__ import annotations

import sys

from embodied.core.errors import EmbodiedError
from embodied.system.vulkan_setup import install


def main() -> int:
    try:
        print(install())
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
