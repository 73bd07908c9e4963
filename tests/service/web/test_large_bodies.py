"""Bodies are counted before anything is made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.web import json_body
from service.web.json_body import MAX_PARTS, count_parts
from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway

TEXTS = st.text(alphabet='a\\"[]{}:,é', max_size=8)
VALUES = st.recursive(
    st.one_of(TEXTS, st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def num_parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_parts, value.values()))
    return 1 + sum(map(num_parts, value)) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_X2_parts_in_strings_do_not_count(value: Any, is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_PARTS", -1)
        assert count_parts(raw) == num_parts(value)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5]] * MAX_PARTS},
        {"prompt": "x", "logit_bias": {str(number): 1 for number in range(MAX_PARTS)}},
        {"prompt": "x", **{f"f{number}": None for number in range(MAX_PARTS)}},
    ],
    ids=["lists", "members", "fields"],
)
async def test_X2_a_body_of_too_many_parts_is_refused(body: dict[str, Any]) -> None:
    async with gateway(FakeBackend()) as server:
        response = await server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "too_many_values"


async def test_a_large_body_is_refused_by_its_field_as_a_small_one_is() -> None:
    async with gateway(FakeBackend()) as server:
        for padding in (1, 100_000):
            body = {"prompt": "x" * padding, "temperature": "hot"}
            error = error_of(await server.client.post("/v1/completions", json=body))
            assert error["param"] == "temperature"
