"""Camera images of real LIBERO: small ones, few of them, since each takes a tenth of a second without a GPU."""

import importlib.util

import numpy as np
import pytest
from plain_scenes import bare, scenes, with_small_pictures

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.env_checker import check_vector_env
from embodied.envs.libero.config import LiberoConfig

TASK, SIDE = "libero_object/2", 48
LIBERO = importlib.util.find_spec("libero") is not None
pytestmark = pytest.mark.filterwarnings("ignore")  # robosuite's, numba's and bddl's own
needs_libero = pytest.mark.skipif(not LIBERO, reason="needs LIBERO")


def config(**options):
    return LiberoConfig(name="libero", task=TASK, **{"cameras": ("agentview", "wrist"), "image_size": SIDE, **options})


@pytest.fixture(autouse=True, scope="module")
def small_pictures(tmp_path_factory):
    """On things, instead of pictures of 50 MB each."""
    with scenes(with_small_pictures(tmp_path_factory.mktemp("pictures"))):
        yield


@pytest.fixture(scope="module")
def env():
    if not LIBERO:
        pytest.skip("needs LIBERO")
    env = make_env(config(), 2)
    env.reset(options={"episodes": [EpisodeSpec(TASK, 0, 0, 0), EpisodeSpec(TASK, 1, 0, 1)]})
    yield env
    env.close()


def paints(env, monkeypatch):
    """Rows and cameras drawn from now on."""
    drawn = []
    painter = env._painter(env._rows[0])
    paint = painter.paint
    monkeypatch.setattr(
        painter,
        "paint",
        lambda row, camera, side: drawn.append((env._rows.index(row), camera)) or paint(row, camera, side),
    )
    return drawn


def test_images_are_drawn_where_a_chunk_ends_and_where_an_episode_does(env, monkeypatch):
    drawn = paints(env, monkeypatch)
    both = [(row, camera) for row in (0, 1) for camera in ("agentview", "wrist")]
    actions = np.zeros((2, 8, 7), np.float32)
    images = env.step_chunk(actions).obs["images"]
    assert sorted(drawn) == both
    assert {name: (image.shape, image.dtype) for name, image in images.items()} == dict.fromkeys(
        ("agentview", "wrist"), ((2, SIDE, SIDE, 3), np.dtype(np.uint8))
    )
    assert all(image.std() > 20 for image in images.values())
    drawn.clear()
    env._limit[1] = env._elapsed[1] + 3
    env.step_chunk(actions)
    assert sorted(drawn) == both  # row 1 where it ended inside the chunk, row 0 at the border
    drawn.clear()
    env.reset(options={"reset_mask": np.array([False, True]), "episodes": [None, EpisodeSpec(TASK, 1, 0, 1)]})
    assert drawn == both[2:]


def test_the_renderer_is_freed_for_a_learner_and_made_again(env):
    before, row = env.observe()["images"], env._rows[0]
    assert env.free_gpu_memory()
    env._image_cache.stale[:] = True
    after = env.observe()["images"]
    assert env._rows[0] is row  # the simulation stayed
    for camera, images in before.items():
        np.testing.assert_array_equal(after[camera], images)


def test_images_are_the_right_way_up(env):
    """An object that moves shows where the camera's position and direction say, rows counted from above."""
    row = env._rows[0]
    row.scene.attach(row)
    model, data = row.scene.model, row.data._data
    before = env._painter(row).paint_now(row, "agentview", SIDE).astype(int)
    body = row.scene.env.obj_body_id["salad_dressing_1"]
    place = data.xpos[body].copy()
    geoms = np.flatnonzero(model.geom_bodyid == body)
    kept = data.geom_xpos[geoms].copy()
    data.geom_xpos[geoms] += 50  # far away
    after = env._painter(row).paint_now(row, "agentview", SIDE).astype(int)
    data.geom_xpos[geoms] = kept
    changed = np.argwhere(np.abs(after - before).sum(axis=2) > 60)
    camera = model.camera("agentview").id
    seen = data.cam_xmat[camera].reshape(3, 3).T @ (place - data.cam_xpos[camera])  # x right, y up, looking along -z
    scale = SIDE / 2 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
    expected = SIDE / 2 + scale * np.array([-seen[1], seen[0]]) / -seen[2]
    assert np.abs(np.median(changed, axis=0) - expected).max() < 4


def test_the_floor_is_as_bright_as_in_mujoco_3_3_2():
    """MuJoCo 3.3.2 draws this frame with a mean of 139, 3.3.3 with 103."""
    env = make_env(config(), 1)
    frame = env.reset(options={"episodes": [EpisodeSpec(TASK, 0, 0, 0)]})[0]["images"]["agentview"]
    env.close()
    assert abs(frame.mean() - 139) < 10


def test_mirrored_images_are_the_raw_frames_turned_by_180_degrees(env):
    upright = env._paint(np.array([0]))
    env.config = env.config.model_copy(update={"mirrored": True})
    mirrored = env._paint(np.array([0]))
    env.config = env.config.model_copy(update={"mirrored": False})
    for name, image in upright.items():
        raw = image[0][::-1]  # as OpenGL and LIBERO give it
        assert np.array_equal(mirrored[name][0], raw[::-1, ::-1])


def test_states_do_not_depend_on_images(env):
    episode = EpisodeSpec(TASK, 4, 2, 0)
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 4, 7)).astype(np.float32)
    with scenes(bare):
        plain = make_env(config(cameras=()), 1)
        plain.reset(options={"episodes": [episode]})
    env.reset(options={"reset_mask": np.array([True, False]), "episodes": [episode, None]})
    blind = plain.step_chunk(actions).obs["state"][0]
    assert np.array_equal(blind, env.step_chunk(np.repeat(actions, 2, 0)).obs["state"][0])
    plain.close()


def test_without_opengl_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr("embodied.envs.mujoco.rendering.loads", lambda library: False)
    with pytest.raises(ConfigError, match="apt-get install libegl1"):
        env_class(config()).check(config())
    env_class(config()).check(config(cameras=()))


@needs_libero
@pytest.mark.slow
def test_the_contract_holds_with_images():
    env = make_env(config(cameras=("agentview",), image_size=16, max_episode_steps=3), 3)
    check_vector_env(env)
    env.close()


@needs_libero
@pytest.mark.slow
def test_states_observations_and_pixels_are_libero_s_own():
    from libero_itself import compare

    names = ("states", "observed", "agentview", "wrist")
    with scenes(lambda xml: xml):  # as they are
        assert compare("libero_spatial/2", chunks=1) == dict.fromkeys(names, 0)
