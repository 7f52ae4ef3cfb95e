"""Breaks `register()` in one way after another and reports, as JSON, what vLLM's plugin loader and factory then do.

Runs in vLLM's own environment, where the wheel is installed; each way in a fork of its own, so that vLLM is imported
once. Not a test: tests/lab/test_registration.py runs it and judges.
"""

import importlib.abc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as Factory
from vllm.plugins import load_general_plugins

FACTORY = Factory.__module__
METHODS = {name: vars(Factory)[name] for name in ("get_connector_class", "get_connector_class_by_name")}
SECONDS = 60


class Exits(importlib.abc.MetaPathFinder):
    """Ends the process when guard.hook.connector is imported."""

    def find_spec(self, name, path, target=None):
        if name == "guard.hook.connector":
            raise SystemExit("broken on purpose")


class Deaf(logging.Handler):
    """A log handler that cannot log."""

    def handle(self, record):
        raise OSError("no space left for logs")


def nothing():
    """The hook as it is, to show that it would be on."""


def switched_off():
    os.environ["KVGUARD_HOOK"] = "off"


def endpoint_cannot_be_read():
    os.environ["KVGUARD_ENDPOINT"] = "http://[::1"


def files_and_numbers_cannot_be_read():
    os.environ |= {"KVGUARD_TOKEN_FILE": "/", "KVGUARD_CA_FILE": "/nowhere", "KVGUARD_RING": "many"}


def plugin_module_cannot_be_imported():
    sys.modules["guard.hook.config"] = None


def connector_module_cannot_be_imported():
    sys.modules["guard.hook.connector"] = None


def connector_module_ends_the_process():
    sys.meta_path.insert(0, Exits())


def vllm_has_no_such_factory():
    sys.modules[FACTORY] = None


def factory_has_other_methods():
    for name in METHODS:
        delattr(Factory, name)


def factory_methods_are_static():
    for name, method in METHODS.items():
        setattr(Factory, name, staticmethod(method.__get__(None, Factory)))


def factory_cannot_be_changed():
    import guard.hook.plugin

    def refuse(*_):
        raise MemoryError

    guard.hook.plugin._patch = refuse


def settings_raise():
    from guard.hook.config import HookConfig

    def fail(_):
        raise RecursionError("broken on purpose")

    HookConfig.from_env = fail


def settings_raise_and_the_log_too():
    settings_raise()
    logging.getLogger("vllm.kvguard").addHandler(Deaf())


def class_cannot_be_made():
    import guard.hook.connector

    def fail(_):
        raise TypeError("broken on purpose")

    guard.hook.connector.guarded = fail


WAYS = [
    nothing, switched_off, endpoint_cannot_be_read, files_and_numbers_cannot_be_read, plugin_module_cannot_be_imported,
    connector_module_cannot_be_imported, connector_module_ends_the_process, vllm_has_no_such_factory,
    factory_has_other_methods, factory_methods_are_static, factory_cannot_be_changed, settings_raise,
    settings_raise_and_the_log_too, class_cannot_be_made,
]  # fmt: skip


def mend() -> None:
    """Gives vLLM back what a way took from it and not from us, so that its factory can be asked."""
    sys.modules[FACTORY] = sys.modules[FACTORY] or Module
    for name, method in METHODS.items():
        if name not in vars(Factory):
            setattr(Factory, name, method)


def tried(way: Callable[[], None]) -> dict[str, object]:
    """What comes of it: what was raised, and the connector class that vLLM is given."""
    way()
    try:
        load_general_plugins()
        mend()
        cls = Factory.get_connector_class_by_name("ExampleConnector")
    except BaseException as error:  # noqa: BLE001  it is what is looked for
        return {"raised": repr(error)}
    return {"raised": None, "class": cls.__name__, "guarded": "_kvguard_inner" in vars(cls)}


Module = sys.modules[FACTORY]


def main() -> None:
    for way in WAYS:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(SECONDS)
            os.write(write, json.dumps(tried(way)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = {"way": way.__name__, "exit": status, **json.loads(text or "{}")}
        sys.stdout.write(f"WAY {json.dumps(found)}\n")
        sys.stdout.flush()


main()
