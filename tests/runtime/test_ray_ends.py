"""What threads ask of Ray when a run is over."""

import pytest

ray = pytest.importorskip("ray")


@pytest.fixture
def started(monkeypatch):
    """Every start of Ray, none of which takes place."""
    from ray._private import auto_init_hook

    calls = []
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options.get("address")))
    return calls


def test_who_asks_after_the_end_starts_no_cluster_of_rays_own(started):
    from ray.exceptions import RayError

    from embodied.runtime.ray import nodes

    nodes._connect("127.0.0.1:1", None)
    assert started == ["127.0.0.1:1"] and not ray.is_initialized()
    with pytest.raises(RayError):
        ray.get([])
    assert started == ["127.0.0.1:1"]
