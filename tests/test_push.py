"""A policy on the hub: what is shown before, what arrives, and that it is read back."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from tiny_vla import ARM, build, observe, publish, weights_of

from embodied import evaluate, push, train
from embodied.policies.hub import folder_of

INLINE = ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
SHORT = ["run.iterations=1", "env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=32", "eval.episodes=2"]


class Hub:
    """The calls of huggingface_hub.HfApi that a push makes, with repositories in a folder."""

    def __init__(self, folder, fails=None, public=()):
        self.folder, self.fails, self.public = folder, fails or {}, set(public)

    def __getattribute__(self, name):
        fails = object.__getattribute__(self, "fails") if name not in ("folder", "fails") else {}
        if name in fails:
            raise fails[name]
        return object.__getattribute__(self, name)

    def whoami(self):
        return {"name": "ada"}

    def create_repo(self, repo_id, private, repo_type, exist_ok):
        assert repo_type == "model" and exist_ok
        if not private:
            self.public.add(repo_id)

    def repo_info(self, repo_id, repo_type):
        return SimpleNamespace(private=repo_id not in self.public)

    def upload_folder(self, repo_id, folder_path, repo_type, commit_message):
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ["recipe=pointmass_ppo", *SHORT, *INLINE, "eval.videos=1", f"run.dir={folder}"]
    assert train.main(words) == 0
    return next(folder.glob("pointmass_ppo-*"))


def fetched(hub, monkeypatch, tmp_path):
    """Downloads from the hub take the files that were uploaded."""

    def download(repository, allow_patterns):
        there = tmp_path / "cache" / repository
        there.mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in allow_patterns for file in (hub.folder / repository).glob(pattern)):
            shutil.copyfile(file, there / file.name)
        return there

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def test_nothing_is_uploaded_before_the_user_has_seen_it_and_said_yes(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(push, "hub_itself", lambda: pytest.fail("it asked the hub"))
    assert push.main([str(run), "ada/reach", "licence=mit"]) == 0
    told = capsys.readouterr().out
    assert "ada/reach, private" in told and "model.safetensors" in told and "nothing was uploaded" in told
    folder = run / "hub/ada-reach"
    head, text = (folder / "README.md").read_text().split("---\n")[1:]
    assert yaml.safe_load(head)["license"] == "mit"
    for words in ("success_once", "seed 0", "pointmass-v1", "env.name=pointmass env.task=reach", "film.mp4"):
        assert words in text
    assert (folder / "film.mp4").stat().st_size
    assert str(run.parent) not in "".join(file.read_text() for file in folder.glob("*.[myj]*[dn]") if file.is_file())
    assert "run" in yaml.safe_load((folder / "recipe.yaml").read_text())
    assert "By ppo, seed 0" in text


def test_the_card_of_a_run_of_sft_says_imitation_whatever_the_name_of_its_folder(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "learned")
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(about | {"command": "sft"}))
    folder = push.push(str(other), "ada/reach", push.Options(out=str(tmp_path / "card")))
    assert "By imitation, seed 0" in (folder / "README.md").read_text()


def test_a_pushed_policy_is_evaluated_by_its_name(run, tmp_path, monkeypatch, capsys):
    hub = Hub(tmp_path)
    monkeypatch.setattr(push, "hub_itself", lambda: hub)
    assert push.main([str(run), "ada/reach", "yes=true", f"out={tmp_path / 'mine'}"]) == 0
    assert "https://hub/ada/reach/commit/1" in capsys.readouterr().out
    fetched(hub, monkeypatch, tmp_path)
    words = ["checkpoint=ada/reach", "env.name=pointmass", "eval.episodes=2", "eval.videos=0", *INLINE]
    assert evaluate.main([*words, f"run.dir={tmp_path}"]) == 0


FAILURES = {
    "no token": (
        {"whoami": OSError("Token is required")},
        "the hub does not know you (OSError: Token is required): hf",
    ),
    "no such user": ({"create_repo": OSError("403 Forbidden")}, "ada/reach was not uploaded"),
    "it breaks": ({"upload_folder": ConnectionError("reset")}, "the same command goes on"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_an_upload_that_fails_loses_nothing_and_says_how_to_go_on(what, run, tmp_path, monkeypatch, capsys):
    fails, words = FAILURES[what]
    hub = Hub(tmp_path / "hub", fails)
    monkeypatch.setattr(push, "hub_itself", lambda: hub)
    asked = [str(run), "ada/reach", "yes=true", f"out={tmp_path / 'mine'}"]
    assert push.main(asked) == 1
    error = capsys.readouterr().err
    assert words in error and str(tmp_path / "mine") in error and "Traceback" not in error
    assert (tmp_path / "mine/model.safetensors").is_file()
    hub.fails = {}
    assert push.main(asked) == 0
    assert (tmp_path / "hub/ada/reach/model.safetensors").is_file()


def test_a_repository_that_everybody_reads_is_no_private_one(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(push, "hub_itself", lambda: Hub(tmp_path / "hub", public=["ada/reach"]))
    asked = [str(run), "ada/reach", "yes=true", f"out={tmp_path / 'mine'}"]
    assert push.main(asked) == 2 and "private=false" in capsys.readouterr().err
    assert push.main([*asked, "private=false"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runs/x"], "which policy, and where to?"),
        (["runs/x", "ada"], "no name of a repository"),
        (["runs/x", "ada/reach"], "runs/x: there is no such folder"),
        (["runs/x", "ada/reach", "public=true"], "public has no effect here"),
        (["random", "ada/reach"], "no weights to upload"),
    ],
)
def test_mistakes_in_a_push_command_are_explained(words, told, capsys):
    assert push.main(words) == 2
    assert told in capsys.readouterr().err


def test_a_policy_that_began_with_lerobots_folder_leaves_in_its_layout_with_its_own_statistics(tmp_path, monkeypatch):
    folder = publish(tmp_path / "published", "smolvla", ARM)
    policy = build("smolvla", spec=ARM, pretrained=str(folder))
    policy.action_scale.shift += 0.5
    policy.save_pretrained(tmp_path / "policy")
    hub = Hub(tmp_path / "hub")
    out = push.push(str(tmp_path / "policy"), "ada/arm", push.Options(yes=True, out=str(tmp_path / "out")), hub)
    fetched(hub, monkeypatch, tmp_path)
    assert weights_of(out).keys() == weights_of(folder).keys()
    stored = load_file(out / "policy_preprocessor_step_5.safetensors")
    before = load_file(folder / "policy_preprocessor_step_5.safetensors")
    assert (stored["action.mean"] - before["action.mean"]).numpy() == pytest.approx(0.5)
    assert (stored["action.std"] == before["action.std"]).all()
    again = build("smolvla", spec=ARM, pretrained=str(folder_of("ada/arm")))
    obs, draws = observe(2, ARM), np.random.default_rng(0).normal(size=(2, policy.noise_spec().width))
    ours, theirs = (each.act(obs, draws, temperature=0.0).actions for each in (policy, again))
    assert theirs == pytest.approx(ours, abs=1e-5)
    assert "SmolVLAPolicy" in (out / "README.md").read_text()
