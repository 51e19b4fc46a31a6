"""Whether the bridge tasks' files are here; they are other people's, so tests that need them are skipped elsewhere."""

import pytest

WHERE = "set MS_ASSET_DIR, or put them into shared/assets/data beside the checkout"


def needs(task):
    """A mark for tests that play this task. It looks when the test begins, since ManiSkill takes long to import."""
    return pytest.mark.skipif(f"__import__('bridge_files').are_missing({task!r})", reason=f"needs its files: {WHERE}")


def are_missing(task):
    try:
        from embodied.envs.maniskill.tasks import missing_assets

        return bool(missing_assets(task))
    except ModuleNotFoundError:
        return True
