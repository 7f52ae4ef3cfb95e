"""`/v1/offload`: see and switch remote reads and stores."""

import asyncio
import hashlib
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from guard.history.shapes import Call, Override
from guard.service import offload, shapes
from guard.service.auth import require
from guard.service.controlled import control_of
from guard.service.directives import Engine
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.service.switches import override_etag

ACK_POLL_SECONDS = 0.02
MAX_ACK_WAIT = 60.0

router = APIRouter(prefix="/v1/offload", tags=["offload"])
Reader = Annotated[str, Depends(require("read"))]
Admin = Annotated[str, Depends(require("admin"))]
Wait = Annotated[float, Query(ge=0, le=MAX_ACK_WAIT, description="seconds to wait until every live engine applied it")]
IfMatch = Annotated[str, Header(description="switch only when the scope still has this ETag")]
Key = Annotated[
    str,
    Header(
        max_length=128,
        pattern=r"^[\x21-\x7e]*$",
        description="a new one per switch, the same one when it is sent again: it is then done once",
    ),
]


@router.get("", response_model=shapes.OffloadOut)
async def get_offload(request: Request, _: Reader) -> Response:
    """Every switch in force, and what is asked of every engine and backend."""
    runtime: Runtime = request.app.state.runtime
    now = runtime.clock.wall()
    answer = shapes.OffloadOut.model_validate(
        {
            "default_mode": runtime.settings.default_mode,
            "overrides": [shapes.OverrideOut.of(item, now) for item in runtime.switches.overrides.in_force(now)],
            "engines": [row for engine in runtime.registry.engines.values() for row in _rows(runtime, engine, now)],
        }
    )
    return Response(answer.model_dump_json(), media_type="application/json")


@router.get("/history", response_model=shapes.HistoryOut)
async def get_history(
    request: Request,
    _: Reader,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1)] = None,
    scope: str | None = None,
) -> shapes.HistoryOut:
    """Who switched what, when, why and from where, and what the controller did with its evidence; newest first."""
    runtime: Runtime = request.app.state.runtime
    found = await runtime.switches.history(limit + 1, before, scope)
    page = found[:limit]
    return shapes.HistoryOut(
        switches=[shapes.SwitchOut.of(item) for item in page],
        next_before=page[-1].id if len(found) > limit else None,
    )


@router.get("/{scope:path}", response_model=shapes.OverrideOut)
async def get_scope(request: Request, scope: str, _: Reader) -> Response:
    """The switch in force for exactly this scope, with its ETag."""
    runtime: Runtime = request.app.state.runtime
    now = runtime.clock.wall()
    override = runtime.switches.overrides.get(_scope(scope), now)
    if override is None:
        raise Problem(404, f"no switch is in force for {scope}", headers={"ETag": override_etag(None)})
    body = shapes.OverrideOut.of(override, now).model_dump_json()
    return Response(body, media_type="application/json", headers={"ETag": override_etag(override)})


@router.put("/{scope:path}", response_model=shapes.Switched)
async def put_scope(
    request: Request,
    scope: str,
    switch: shapes.SwitchIn,
    who: Admin,
    wait: Wait = 0.0,
    if_match: IfMatch = "",
    if_none_match: Annotated[str, Header(description="*: switch only when there is no switch yet")] = "",
    idempotency_key: Key = "",
) -> Response:
    """Switches a scope; answers when the switch is on disk, with `wait` when the live engines have applied it."""
    runtime: Runtime = request.app.state.runtime
    now = runtime.clock.wall()
    parsed = _scope(scope)
    _need_reason(runtime, parsed, switch.reason)
    override = Override(
        scope=parsed,
        mode=switch.mode,
        stores=switch.stores,
        on_lease_expiry=switch.on_lease_expiry or offload.default_on_lease_expiry(switch.mode),
        expires_at=None if switch.ttl_seconds is None else now + switch.ttl_seconds,
        reason=switch.reason,
        who=who,
        since=now,
    )
    call = _call(request, idempotency_key, switch.model_dump_json())
    written, replayed = await runtime.switches.put(override, call, if_match=if_match, if_none_match=if_none_match)
    return await _switched(runtime, scope, written, wait, replayed=replayed)


@router.delete("/{scope:path}", response_model=shapes.Switched)
async def delete_scope(
    request: Request,
    scope: str,
    who: Admin,
    wait: Wait = 0.0,
    reason: Annotated[shapes.Reason, Query()] = "",
    if_match: IfMatch = "",
    idempotency_key: Key = "",
) -> Response:
    """Takes a switch away: wider switches or the default hold again."""
    runtime: Runtime = request.app.state.runtime
    parsed = _scope(scope)
    _need_reason(runtime, parsed, reason)
    call = _call(request, idempotency_key, f"clear {reason}")
    replayed = await runtime.switches.clear(parsed, call, reason=reason, who=who, if_match=if_match)
    return await _switched(runtime, scope, None, wait, replayed=replayed)


def _call(request: Request, key: str, content: str) -> Call:
    source = request.client.host if request.client else ""
    return Call(source, key, hashlib.sha256(content.encode()).hexdigest() if key else "")


def _need_reason(runtime: Runtime, scope: str, reason: str) -> None:
    wanted = runtime.settings.require_reason
    if not reason.strip() and (wanted == "always" or (wanted == "fleet" and scope == "fleet")):
        raise Problem(422, f"say why: a reason is required here (require_reason = {wanted})", kind="reason-required")


def _scope(text: str) -> str:
    try:
        return offload.parse_scope(text)
    except ValueError as error:
        raise Problem(400, str(error), kind="bad-scope") from None


async def _switched(
    runtime: Runtime, scope: str, override: Override | None, wait: float, *, replayed: bool
) -> Response:
    now = runtime.clock.wall()
    engines = runtime.registry.concerned(scope)
    pending = await _acknowledged(engines, wait)
    late = {engine.poll.engine_id for engine in pending}
    answer = shapes.Switched(
        scope=scope,
        override=shapes.OverrideOut.of(override, now) if override else None,
        engines=len(engines),
        shadowed=_shadowed(runtime, scope, engines, now) if override else 0,
        acknowledged=sorted({engine.poll.engine_id for engine in engines} - late),
        pending=sorted(late),
    )
    headers = {"ETag": override_etag(override), **({"Idempotent-Replayed": "true"} if replayed else {})}
    return JSONResponse(answer.model_dump(mode="json"), headers=headers)


async def _acknowledged(engines: list[Engine], wait: float) -> list[Engine]:
    """The engines that have not applied what is in force for them after at most `wait` seconds."""
    pending = [engine for engine in engines if not engine.acknowledged]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    while pending and loop.time() < deadline:
        await asyncio.sleep(ACK_POLL_SECONDS)
        pending = [engine for engine in pending if not engine.acknowledged]
    return pending


def _shadowed(runtime: Runtime, scope: str, engines: list[Engine], now: float) -> int:
    return sum(
        holds is not None and holds.scope != scope
        for engine in engines
        for backend in engine.poll.backends
        if offload.matches(scope, engine.poll.engine_id, engine.poll.model, (backend,))
        for holds in [runtime.switches.overrides.resolve(engine.poll.engine_id, engine.poll.model, backend, now)]
    )


def _rows(runtime: Runtime, engine: Engine, now: float) -> list[dict[str, object]]:
    poll, registry = engine.poll, runtime.registry
    rows: list[dict[str, object]] = []
    for item in registry.directives(engine):
        override = runtime.switches.overrides.resolve(poll.engine_id, poll.model, item.backend, now)
        applied = engine.applied.get(item.backend)
        # By the id that is shown: for a moment after a switch ran out that is newer than what the hook was sent.
        acknowledged = applied is not None and applied[0] == item.id
        rows.append(
            {
                "engine_id": poll.engine_id,
                "backend": item.backend,
                "model": poll.model,
                "mode": item.mode,
                "scope": override.scope if override else None,
                "who": override.who if override else None,
                "state": item.state,
                "state_since": shapes.at(runtime.controlling.since(poll.engine_id, item.backend)),
                **control_of(runtime.controlling, poll.engine_id, item.backend, poll.model),
                "stores": item.stores,
                "directive_id": item.id,
                "acknowledged": acknowledged,
                "acknowledged_at": shapes.at(applied[1]) if applied and acknowledged else None,
                "last_poll_age_seconds": round(registry.age(engine), 3),
                "silent": registry.silent(engine),
                "reason": item.reason,
                "since": shapes.at(override.since) if override else None,
                "ttl_seconds": shapes.left(override.expires_at if override else None, now),
                "hook_version": poll.hook,
                "instance": poll.instance,
            }
        )
    return rows
