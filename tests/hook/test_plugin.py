"""Registration: patches the factory once, never raises, and leaves vLLM alone where anything is odd."""

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from guard.hook import plugin
from guard.hook.failsafe import LOGGER_NAME
from tests.hook.fakes_vllm import FakeConnector

ENV = {"KVGUARD_ENDPOINT": "http://127.0.0.1:9"}


class MultiConnector:
    """Stands for vLLM's, which hands on to its children."""


def new_factory() -> Any:
    class Factory:
        calls: list[Any] = []  # noqa: RUF012

        @classmethod
        def get_connector_class(cls, config: Any) -> type:
            cls.calls.append(config)
            return MultiConnector if config == "multi" else FakeConnector

        @classmethod
        def get_connector_class_by_name(cls, name: str) -> type:
            return FakeConnector

        @classmethod
        def _get_connector_class_with_compat(cls, config: Any) -> tuple[type, bool]:
            return FakeConnector, True

    return Factory


def is_guarded(cls: Any) -> bool:
    return hasattr(cls, "_kvguard_inner")


def test_all_ways_to_a_class_are_guarded_and_agree() -> None:
    factory = new_factory()
    assert plugin.install(ENV, factory)
    found = factory.get_connector_class("x")
    assert is_guarded(found)
    assert factory.get_connector_class_by_name("x") is found
    assert factory._get_connector_class_with_compat("x") == (found, True)
    assert factory.calls == ["x"]


def test_registration_is_idempotent() -> None:
    factory = new_factory()
    plugin.install(ENV, factory)
    first = vars(factory)["get_connector_class"]
    plugin.install(ENV, factory)
    assert vars(factory)["get_connector_class"] is first


def test_a_multi_connector_itself_is_not_guarded() -> None:
    factory = new_factory()
    plugin.install(ENV, factory)
    assert factory.get_connector_class("multi") is MultiConnector


@pytest.mark.parametrize("env", [{}, {"KVGUARD_ENDPOINT": ""}, {**ENV, "KVGUARD_HOOK": "off"}])
def test_off_means_untouched(env: dict[str, str]) -> None:
    factory = new_factory()
    assert not plugin.install(env, factory)
    assert factory.get_connector_class("x") is FakeConnector


def test_an_exception_of_the_factory_passes_untouched() -> None:
    class Factory:
        @classmethod
        def get_connector_class(cls, config: Any) -> type:
            raise ValueError("Unsupported connector type")

    plugin.install(ENV, Factory)
    with pytest.raises(ValueError, match="Unsupported connector type"):
        Factory.get_connector_class("x")


def test_a_class_that_cannot_be_guarded_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Final(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], **options: Any) -> type:
            if bases:
                raise TypeError("may not be subclassed")
            return super().__new__(mcs, name, bases, space)

    class Closed(metaclass=Final):
        pass

    assert plugin.guard_class(Closed) is Closed
    assert plugin.guard_class(None) is None


class Absent:
    """A factory of some other vLLM."""


class Property:
    get_connector_class = property(lambda self: FakeConnector)


class Static:
    @staticmethod
    def get_connector_class(config: Any) -> type:
        return FakeConnector


class Sealed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only")


class ReadOnly(metaclass=Sealed):
    @classmethod
    def get_connector_class(cls, config: Any) -> type:
        return FakeConnector


def broken_module(error: BaseException) -> ModuleType:
    class Module(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise error

    return Module("broken")


FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.mark.parametrize(
    "module",
    [
        None,  # vLLM is not there
        ModuleType("empty"),
        broken_module(ImportError("half installed")),
        broken_module(RuntimeError("boom")),
        broken_module(SystemExit(3)),
        broken_module(MemoryError()),
        Absent,
        Property,
        Static,
        ReadOnly,
        42,
    ],
)
def test_register_never_raises(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_ENDPOINT", ENV["KVGUARD_ENDPOINT"])
    parts = FACTORY.split(".")
    for depth in range(1, len(parts)):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    if module is not None and not isinstance(module, ModuleType):
        holder = ModuleType("holder")
        holder.KVConnectorFactory = module  # type: ignore[attr-defined]
        module = holder
    monkeypatch.setitem(sys.modules, FACTORY, module)
    assert plugin.register() is None


@pytest.mark.parametrize("value", ["\x00", "http://", "ftp://x", "http://[::1", "http://x:99999", ","])
def test_register_survives_any_setting(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.os, "environ", {"KVGUARD_ENDPOINT": value, "KVGUARD_HOOK": value})
    assert plugin.register() is None


def test_register_survives_a_broken_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("log disk full")

    logger = logging.getLogger(LOGGER_NAME)
    handler = Broken()
    monkeypatch.setenv("KVGUARD_ENDPOINT", ENV["KVGUARD_ENDPOINT"])
    monkeypatch.setitem(sys.modules, FACTORY, None)
    logger.addHandler(handler)
    try:
        assert plugin.register() is None
    finally:
        logger.removeHandler(handler)


def test_the_explicit_form_finds_a_connector_by_its_guarded_name(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = ModuleType("holder")
    holder.KVConnectorFactory = new_factory()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FACTORY, holder)
    for depth in range(1, 4):
        name = ".".join(FACTORY.split(".")[:depth])
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    assert is_guarded(plugin.Guarded_FakeConnector)
    with pytest.raises(AttributeError):
        _ = plugin.Unguarded


def test_factory_methods_of_another_kind_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Factory:
        @staticmethod
        def get_connector_class_by_name(name: str) -> type:
            return FakeConnector

    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        plugin.install(ENV, Factory)
    assert Factory.get_connector_class_by_name("x") is FakeConnector
    assert "not a class method" in caplog.text
