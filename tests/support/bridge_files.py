"""Whether the bridge tasks' files are here; they are other people's, so tests that need them are skipped elsewhere."""

import pytest


def needs(task):
    """A mark for tests that play this task."""
    try:
        from embodied.envs.maniskill.tasks import missing_assets

        missing = missing_assets(task)
    except ModuleNotFoundError:
        missing = ["mani_skill"]
    return pytest.mark.skipif(
        bool(missing),
        reason=f"needs {', '.join(missing)}: set MS_ASSET_DIR, or put them into shared/assets/data beside the checkout",
    )
