"""What is installed into vLLM's environment: no dependency, the entry point, and a hook that needs nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (found,) = out.glob("kvguard-*.whl")
    return found


@pytest.fixture
def unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_no_dependency_outside_extras(unpacked):
    (metadata,) = unpacked.glob("kvguard-*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")]
    assert required
    assert [line for line in required if "extra ==" not in line] == []


def test_vllm_finds_the_hook(unpacked):
    (entry_points,) = unpacked.glob("kvguard-*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nkvguard = guard.hook.plugin:register" in entry_points.read_text()


def test_only_the_package_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"guard"}


@pytest.mark.parametrize(
    "module",
    ["recorder", "exporter", "directives", "failsafe", "plugin", "scheduler", "worker", "connector", "runtime"],
)
def test_hook_imports_with_the_standard_library_alone(unpacked, module):
    # -S: no site-packages; the empty directory holds the unpacked wheel only.
    code = f"import guard.hook.{module}, sys; print(guard.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=unpacked, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_register_without_vllm_does_nothing_and_raises_nothing(unpacked):
    code = "import guard.hook.plugin as p; print(p.register())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=unpacked,
        env={"KVGUARD_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
