"""`/v1/inflection`: departure, break-even, knee and verdict per backend and class."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from guard.estimate.shapes import PRIOR_BREAK_EVEN_RTT, PRIOR_DEPARTURE_RTT, Cell
from guard.service.auth import require
from guard.service.runtime import Runtime

router = APIRouter(prefix="/v1", tags=["inflection"])
Reader = Annotated[str, Depends(require("read"))]


@router.get("/inflection")
async def get_inflection(
    request: Request,
    _: Reader,
    model: str | None = None,
    backend: str | None = None,
    class_: Annotated[str | None, Query(alias="class")] = None,
    state: Annotated[str | None, Query(description="only verdicts with this state")] = None,
) -> Response:
    """What a remote read costs and saves, where TTFT departs and offload stops paying, and how sure that is.

    Every figure has value, interval (low, high), n, source (`measured`, `projected`, `prior`) and a reason where it
    has no value. Class `all` is the pool of a backend; classes with few reads stand on it (`pooled`).
    """
    runtime: Runtime = request.app.state.runtime
    estimating = runtime.estimating
    found = [
        cell_json(cell, simulated=(cell.model, cell.backend) in estimating.simulated)
        for cell in runtime.cells()
        if model in (None, cell.model)
        and backend in (None, cell.backend)
        and class_ in (None, cell.class_)
        and state in (None, cell.verdict.state)
    ]
    return JSONResponse(
        {
            "cells": found,
            "fitted_at": estimating.fitted,
            "fit_seconds": estimating.seconds,
            "priors": {
                "departure_rtt_seconds": PRIOR_DEPARTURE_RTT,
                "break_even_rtt_seconds": PRIOR_BREAK_EVEN_RTT,
                "note": "published by one report for one system; they stand only until this deployment's own data do",
            },
        }
    )


def cell_json(cell: Cell, *, simulated: bool = False) -> dict[str, Any]:
    """A cell as the API shows it. RTT and times in seconds."""
    data = asdict(cell)
    return {
        "model": data.pop("model"), "backend": data.pop("backend"), "class": data.pop("class_"), "n": data.pop("n"),
        "simulated": simulated, "pooled": data.pop("pooled"), "verdict": data.pop("verdict"),
        "rtt": {name: data.pop(f"rtt_{name}") for name in ("now", "floor", "low", "high")},
        "reference": {
            "prompt_tokens": data.pop("reference_tokens"), "local_tokens": data.pop("reference_local"),
            "matched_tokens": data.pop("reference_matched"), "bytes_per_token": data.pop("bytes_per_token"),
            "rest_seconds": data.pop("rest"),
        },
        "models": {name: data.pop(name) for name in ("fetch", "lookup", "prefill")},
        **data,
    }  # fmt: skip
