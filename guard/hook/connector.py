"""The guarded connector: a subclass of whatever connector is configured, made when vLLM asks for its class.

It keeps the inner class's name, so that vLLM's checks by name, `isinstance`, class methods and methods that newer
versions add go on working by inheritance. Each override has the same shape: our part inside a try that counts the
error and goes on, the inner connector's part outside of it, so that its own exceptions pass untouched. Past a limit of
errors the failsafe trips and every override only calls the inner method.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Final

from guard.connectors import Capability, capability_of
from guard.hook.adapters.base import Adapter
from guard.hook.attach import attach, prepare
from guard.hook.config import vllm_metrics
from guard.hook.engine_stats import reporting
from guard.hook.envelope import ENVELOPE, Envelope, SyncLoads
from guard.hook.failsafe import Failsafe
from guard.hook.scheduler import SchedulerSide
from guard.hook.worker import WorkerSide

MARK: Final = "_kvguard_inner"
_MISSING: Final = object()


def guarded(inner: type) -> type:
    """The guarded version of a connector class; the class itself when it is guarded already."""
    if MARK in vars(inner):
        return inner
    capability = capability_of(inner)
    cls = _make(inner, capability)
    # What vLLM calls is what its base class has; a connector may bring methods for newer versions.
    base = next((parent for parent in inner.__mro__ if parent.__name__ == "KVConnectorBase_V1"), inner)
    if hasattr(base, "on_new_request"):
        cls.on_new_request = _on_new_request(cls)  # type: ignore[attr-defined]
    if hasattr(base, "get_transfer_results"):
        cls.get_transfer_results = _get_transfer_results(cls)  # type: ignore[attr-defined]
    else:
        cls.get_finished = _get_finished(cls)  # type: ignore[attr-defined]
    if hasattr(inner, "request_finished_all_groups"):
        cls.request_finished_all_groups = _request_finished_all_groups(cls)  # type: ignore[attr-defined]
    if vllm_metrics(os.environ):
        cls = reporting(cls)
    cls.__name__ = inner.__name__
    cls.__qualname__ = inner.__qualname__
    cls.__module__ = inner.__module__
    cls.__doc__ = inner.__doc__
    return cls


def _make(inner: Any, capability: Capability) -> type:  # noqa: C901  one class, many short methods
    class Guarded(inner):  # type: ignore[misc]
        _kvguard_inner = inner

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = _MISSING) -> None:
            self._kvguard_failsafe = Failsafe()
            self._kvguard_scheduler: SchedulerSide | None = None
            self._kvguard_worker: WorkerSide | None = None
            self._kvguard_adapter: Adapter | None = None
            self._kvguard_leave: Callable[[], None] | None = None
            self._kvguard_sync: tuple[int, int, int] | None = None
            self._kvguard_boot = ""
            self._kvguard_role = getattr(role, "name", "")
            self._kvguard_saving = 0
            try:
                prepare(capability, role)
            except Exception as error:  # noqa: BLE001  nothing of ours reaches the engine
                self._kvguard_failsafe.record("prepare", error)
            if kv_cache_config is _MISSING:
                super().__init__(vllm_config, role)
            else:
                super().__init__(vllm_config, role, kv_cache_config)
            try:
                attach(self, capability, vllm_config, role, None if kv_cache_config is _MISSING else kv_cache_config)
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("attach", error)
                self._kvguard_scheduler = self._kvguard_worker = None

        # -- scheduler side --

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            side = self._kvguard_scheduler
            if side is None or self._kvguard_failsafe.tripped:
                return super().get_num_new_matched_tokens(request, num_computed_tokens)
            try:
                answer = side.before_lookup(request, num_computed_tokens)
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("before_lookup", error)
                answer = None
            if answer is not None:
                return answer
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
            try:
                return side.after_lookup(request, num_computed_tokens, found)
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("after_lookup", error)
                return found

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            side = self._kvguard_scheduler
            if side is not None and not self._kvguard_failsafe.tripped:
                try:
                    side.allocated(request, blocks, num_external_tokens)
                except Exception as error:  # noqa: BLE001
                    self._kvguard_failsafe.record("allocated", error)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            side = self._kvguard_scheduler
            if side is None or self._kvguard_failsafe.tripped:
                return super().build_connector_meta(scheduler_output)
            stores = True
            try:
                stores = side.stores()
                if not stores:
                    side.adapter.stop_stores()
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("stop_stores", error)
            try:
                meta = super().build_connector_meta(scheduler_output)
            finally:
                if not stores:
                    try:
                        side.adapter.resume_stores()
                    except Exception as error:  # noqa: BLE001
                        self._kvguard_failsafe.record("resume_stores", error)
            try:
                side.adapter.meta_built(meta, stores=stores)
            except Exception as error:  # noqa: BLE001  what an adapter cannot read must not cost the requests' times
                self._kvguard_failsafe.record("adapter.meta_built", error)
            try:
                side.meta_built(scheduler_output, meta)
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("meta_built", error)
            return meta

        def update_connector_output(self, connector_output: Any) -> None:
            timing = getattr(connector_output, "kv_connector_worker_meta", None)
            if type(timing) is SyncLoads:  # always unwrapped: the inner connector must not see it
                connector_output.kv_connector_worker_meta = timing.inner
            else:
                timing = None
            side = self._kvguard_scheduler
            if side is not None and not self._kvguard_failsafe.tripped:
                try:
                    side.outputs(connector_output, timing)
                except Exception as error:  # noqa: BLE001
                    self._kvguard_failsafe.record("outputs", error)
            super().update_connector_output(connector_output)

        def get_kv_connector_stats(self) -> Any:
            side = self._kvguard_scheduler
            if side is not None and not self._kvguard_failsafe.tripped:
                try:
                    side.table.outputs()
                except Exception as error:  # noqa: BLE001
                    self._kvguard_failsafe.record("first_token", error)
            return super().get_kv_connector_stats()

        def request_finished(self, request: Any, block_ids: Any) -> Any:
            _finished(self, request)
            return super().request_finished(request, block_ids)

        def shutdown(self) -> Any:
            leave, self._kvguard_leave = self._kvguard_leave, None
            if leave is not None:
                try:
                    leave()
                except Exception as error:  # noqa: BLE001
                    self._kvguard_failsafe.record("shutdown", error)
            return super().shutdown()

        # -- worker side --

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            envelope = Envelope.read(getattr(getattr(self, "_connector_metadata", None), ENVELOPE, None))
            if envelope is None:
                super().start_load_kv(forward_context, **kwargs)
                return
            side = None if self._kvguard_failsafe.tripped else self._kvguard_worker
            start = time.monotonic_ns()
            if side is not None:
                try:
                    side.begin(envelope, start)
                except Exception as error:  # noqa: BLE001
                    self._kvguard_failsafe.record("begin", error)
            super().start_load_kv(forward_context, **kwargs)
            if envelope.batch:
                end = time.monotonic_ns()
                self._kvguard_sync = (envelope.batch, start, end)
                if side is not None:
                    try:
                        side.synchronous(envelope, start, end)
                    except Exception as error:  # noqa: BLE001
                        self._kvguard_failsafe.record("synchronous", error)

        def wait_for_save(self) -> None:
            self._kvguard_saving = time.monotonic_ns()
            super().wait_for_save()

        def build_connector_worker_meta(self) -> Any:
            meta = super().build_connector_worker_meta()
            sync = self._kvguard_sync
            if sync is None:
                return meta
            self._kvguard_sync = None
            return SyncLoads(meta, *sync, self._kvguard_boot)

    return Guarded


def _finished(connector: Any, request: Any) -> None:
    side = connector._kvguard_scheduler
    if side is not None and not connector._kvguard_failsafe.tripped:
        try:
            side.finished(request)
        except Exception as error:  # noqa: BLE001
            connector._kvguard_failsafe.record("finished", error)


def _on_new_request(cls: Any) -> Callable[..., None]:
    def on_new_request(self: Any, request: Any) -> None:
        side = self._kvguard_scheduler
        tell = True
        if side is not None and not self._kvguard_failsafe.tripped:
            try:
                tell = side.arrived(request)
            except Exception as error:  # noqa: BLE001
                self._kvguard_failsafe.record("arrived", error)
        if tell:
            super(cls, self).on_new_request(request)

    return on_new_request


def _request_finished_all_groups(cls: Any) -> Callable[..., Any]:
    def request_finished_all_groups(self: Any, request: Any, block_ids: Any) -> Any:
        _finished(self, request)
        return super(cls, self).request_finished_all_groups(request, block_ids)

    return request_finished_all_groups


def _before_results(connector: Any) -> WorkerSide | None:
    side: WorkerSide | None = connector._kvguard_worker
    if side is None or connector._kvguard_failsafe.tripped:
        return None
    try:
        side.stores(connector._kvguard_adapter.pending_stores(), connector._kvguard_saving)
    except Exception as error:  # noqa: BLE001
        connector._kvguard_failsafe.record("pending_stores", error)
    return side


def _after_results(connector: Any, side: WorkerSide, results: Any) -> None:
    """`results` is what the inner connector answered: an object since vLLM 0.32, before that a pair."""
    try:
        pair = isinstance(results, tuple)
        finished = results[1] if pair else results.finished_recving
        if finished:
            failed = None if pair else getattr(results, "failed_recving", None)
            side.finished(finished, failed or connector._kvguard_adapter.failed_loads())
        side.stores(connector._kvguard_adapter.pending_stores())
    except Exception as error:  # noqa: BLE001
        connector._kvguard_failsafe.record("results", error)


def _get_transfer_results(cls: Any) -> Callable[..., Any]:
    def get_transfer_results(self: Any, finished_req_ids: set[str]) -> Any:
        side = _before_results(self)
        results = super(cls, self).get_transfer_results(finished_req_ids)
        if side is not None:
            _after_results(self, side, results)
        return results

    return get_transfer_results


def _get_finished(cls: Any) -> Callable[..., Any]:
    def get_finished(self: Any, finished_req_ids: set[str]) -> Any:
        side = _before_results(self)
        results = super(cls, self).get_finished(finished_req_ids)
        if side is not None:
            _after_results(self, side, results)
        return results

    return get_finished
