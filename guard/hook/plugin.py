"""The entry point that vLLM calls in each of its processes: makes vLLM's factory return guarded connectors.

`register()` never raises, since vLLM calls it with no try and an exception would stop vLLM. Where the factory does not
look as expected it logs and leaves everything as it is.

Without the entry point, name the guarded class in the configuration: `"kv_connector": "Guarded_LMCacheMPConnector",
"kv_connector_module_path": "guard.hook.plugin"`. vLLM's special cases by connector name do not apply then.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from guard.hook.config import HookConfig
from guard.hook.failsafe import logger

PREFIX: Final = "Guarded_"
UNGUARDED: Final = ("MultiConnector",)
"""Connectors that only hand on to others, whose children are guarded instead."""

_METHODS: Final = ("get_connector_class", "get_connector_class_by_name", "_get_connector_class_with_compat")
_classes: Final[dict[type, type]] = {}


def register() -> None:
    """Turns the hook on in this process when `KVGUARD_ENDPOINT` is set."""
    try:
        install(os.environ)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  whatever it is, vLLM would not start
        with suppress(Exception):  # a broken log handler must not stop vLLM either
            logger.warning("kvguard: the hook is off: %s: %s", type(error).__name__, error)


def install(env: Mapping[str, str], factory: Any = None) -> bool:
    """Patches the factory, once. Returns whether the hook is on. `factory` None: vLLM's own."""
    if HookConfig.from_env(env) is None:
        return False
    if factory is None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        factory = KVConnectorFactory
    # Connector code, exporter and TLS are imported now and not while requests are served.
    import guard.hook.connector  # noqa: F401

    found = [name for name in _METHODS if name in vars(factory)]
    for name in found:
        _patch(factory, name)
    if not found:
        logger.warning("kvguard: vLLM's connector factory has none of the expected methods; the hook is off")
        return False
    return True


def guard_class(cls: Any) -> Any:
    """The guarded version of a connector class, one per class; the class itself where it cannot be guarded."""
    if not isinstance(cls, type) or cls.__name__ in UNGUARDED:
        return cls
    found = _classes.get(cls)
    if found is None:
        try:
            from guard.hook.connector import guarded

            found = guarded(cls)
        except Exception as error:  # noqa: BLE001  vLLM goes on with its own class
            logger.warning("kvguard: %s cannot be guarded: %s: %s", cls.__name__, type(error).__name__, error)
            found = cls
        _classes[cls] = found
        _classes[found] = found
    return found


def _patch(factory: Any, name: str) -> None:
    original = vars(factory)[name]
    if not isinstance(original, classmethod):  # a static method has a __func__ too, with other arguments
        logger.warning("kvguard: vLLM's connector factory: %s is not a class method; it stays as it is", name)
        return
    function = original.__func__
    if getattr(function, "_kvguard", False):
        return

    def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = function(cls, *args, **kwargs)
        if isinstance(found, tuple) and found:  # the older method returns the class and a flag
            return (guard_class(found[0]), *found[1:])
        return guard_class(found)

    method._kvguard = True  # type: ignore[attr-defined]
    method.__name__ = name
    method.__doc__ = function.__doc__
    setattr(factory, name, classmethod(method))


def __getattr__(name: str) -> Any:
    """`Guarded_<Inner>`: the guarded version of a connector that vLLM's factory knows by name."""
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    by_name: Callable[[str], Any] = KVConnectorFactory.get_connector_class_by_name
    try:
        return guard_class(by_name(name.removeprefix(PREFIX)))
    except ValueError as error:
        raise AttributeError(f"{name}: {error}") from error
