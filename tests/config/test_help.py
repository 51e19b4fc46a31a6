"""`--help` names every key and answers before anything heavy is imported."""

import json
import subprocess
import sys

import pytest

from embodied.config import RunConfig, load
from embodied.schema import leaves, root

HEAVY = ("torch", "ray", "sapien", "mani_skill", "gymnasium", "tensorboard", "matplotlib", "imageio")
HELP = 'from embodied.{command} import main; code = main(["--help"])'
WITHOUT_US = "import numpy, pydantic, yaml; code = 0"
PROBE = """
import json, resource, sys
{work}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"code": code, "modules": sorted(sys.modules), "cpu_s": used.ru_utime + used.ru_stime}}))
"""


def probe(work):
    told = subprocess.run([sys.executable, "-c", PROBE.format(work=work)], capture_output=True, text=True, check=True)
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", ["train", "sft", "collect", "evaluate", "report", "doctor", "list"])
def test_help_answers_at_once_without_torch_ray_or_a_simulator(command):
    facts = probe(HELP.format(command=command))
    assert facts["code"] == 0
    assert not [name for name in HEAVY if name in facts["modules"]]
    assert facts["cpu_s"] < 5 * probe(WITHOUT_US)["cpu_s"]


def test_help_names_every_key_with_its_meaning(capsys):
    assert load(["--help", "nonsense"]) is None
    assert load(["--help"], entry="sft") is None
    assert load(["--help"], entry="collect") is None
    text = capsys.readouterr().out
    for key, field, _ in leaves(root(RunConfig)):
        assert f"  {key} " in text
        assert field.description, f"{key} has no help"
    assert max(map(len, text.splitlines())) <= 120
