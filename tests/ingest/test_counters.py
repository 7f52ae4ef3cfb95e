"""A hook whose ring overflowed says so even when it has no span to send."""

import pytest

from guard import semconv as s
from guard.ingest import otlp


@pytest.mark.parametrize("kind", [otlp.PROTOBUF, otlp.JSON])
def test_counters_without_spans_are_kept(body, kind):
    body.resource({s.ENGINE_ID: "host:8000/0", s.RECORDS_DROPPED: 7})
    batch = otlp.decode(body.protobuf() if kind == otlp.PROTOBUF else body.json(), content_type=kind)
    assert batch.groups == [({s.ENGINE_ID: "host:8000/0", s.RECORDS_DROPPED: 7}, [])]
    assert batch.received == 0
