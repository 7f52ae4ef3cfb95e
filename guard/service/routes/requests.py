"""`/v1/correlation` and `/v1/requests/{id}`."""

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["requests"])
