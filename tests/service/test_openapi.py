"""The OpenAPI document: examples that are right, problems as they are sent."""

import httpx2
import pytest
from pydantic import BaseModel

from guard.service import shapes
from guard.service.openapi import EXAMPLES

pytestmark = pytest.mark.anyio

MODELS: dict[tuple[str, str], type[BaseModel]] = {
    ("/v1/offload/{scope}", "get"): shapes.OverrideOut,
    ("/v1/offload/{scope}", "put"): shapes.Switched,
    ("/v1/offload/{scope}", "delete"): shapes.Switched,
    ("/v1/offload/history", "get"): shapes.HistoryOut,
    ("/v1/requests", "get"): shapes.RequestsOut,
}


@pytest.mark.parametrize("place", EXAMPLES, ids=str)
async def test_an_example_is_what_its_route_answers(client: httpx2.AsyncClient, place: tuple[str, str]) -> None:
    model = MODELS[place]
    assert model.model_validate(EXAMPLES[place]).model_dump(mode="json", by_alias=True).keys() == EXAMPLES[place].keys()
    document = (await client.get("/openapi.json")).json()
    path, method = place
    assert (
        document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["example"] == EXAMPLES[place]
    )


async def test_every_operation_tells_of_problems_and_of_nothing_that_is_not_sent(client: httpx2.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for item in document["paths"].values():
        for method in {"get", "put", "post", "delete"} & item.keys():
            problem = item[method]["responses"]["default"]["content"]["application/problem+json"]
            assert problem == {"schema": {"$ref": "#/components/schemas/Problem"}}
            assert "422" not in item[method]["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert document["components"]["schemas"]["SwitchIn"]["examples"][0]["mode"] == "off"
