"""A hook that cannot register leaves vLLM as it is, whatever goes wrong."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.client import prompt
from lab.config import StackConfig
from lab.env import ROOT, LabEnv

pytestmark = pytest.mark.lab

HOOK_ON = {"nothing", "files_and_numbers_cannot_be_read"}


def test_registration_fails_in_many_ways_and_vllm_keeps_its_class(
    lab_env: LabEnv, figure: Callable[[str], None]
) -> None:
    script = Path(__file__).with_name("register_ways.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVGUARD_", "PYTHON"))}
    done = subprocess.run(
        [lab_env.python, script],
        env=environment | {"KVGUARD_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("WAY ")]
    figure(f"{len(found) - 2} ways to break register(): {[way['way'] for way in found[2:]]}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(found) >= 12
    for way in found:
        expected = {"exit": 0, "raised": None, "class": "ExampleConnector", "guarded": way["way"] in HOOK_ON}
        assert way == {"way": way["way"], **expected}


def test_vllm_serves_with_a_hook_that_cannot_register(stacks, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "guard", tmp_path / "guard", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "guard/hook/connector.py").write_text("raise RuntimeError('broken on purpose')\n")
    config = StackConfig(connector="example", injector="none", service=False, hook_env={"PYTHONPATH": str(tmp_path)})
    stack = stacks.get(config)
    text = prompt(700, 8501)
    miss = stack.client.complete(text)
    stack.client.reset_prefix_cache()
    hit = stack.client.complete(text)
    log = stack.vllm.log.read_text()
    stacks.stop()
    assert miss.tokens == hit.tokens
    assert (miss.cached, hit.cached) == (0, 640)
    assert "kvguard: the hook is off: RuntimeError: broken on purpose" in log
    assert ": guards ExampleConnector" not in log
