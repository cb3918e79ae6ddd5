"""Random sequences of requests, made from the description and from earlier answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.property import stateful
from tests.property.test_openapi import World


def test_random_sequences_of_two_tenants_keep_the_rules() -> None:
    seen: Counter[tuple[str, bool]] = Counter()

    class Counted(stateful.Sequences):
        def _exchange(self, tenant: int, name: str, case: Any) -> Any:
            response = super()._exchange(tenant, name, case)
            if response is not None:
                seen[name, response.status_code == 200] += 1
            return response

    stateful.run(50, 40, fixed=True, machine=Counted)
    # Otherwise the sequences would show nothing but refusals. What is done when depends on timing.
    assert len({name for name, good in seen if good}) > 0.85 * len(stateful.ROUTES)
    assert sum(count for (_, good), count in seen.items() if not good) > 100


@pytest.mark.parametrize(
    ("status", "told", "rule"),
    [
        (500, {"detail": "no"}, "Server error"),
        (200, {"sessions": ["session-1"]}, "tells of the other's session-1"),
        (200, {"session_ids": []}, "violates schema"),
    ],
)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, status: int, told: Any, rule: str
) -> None:
    send = World.send

    def broken(self: World, method: str, target: str, *rest: Any) -> Any:
        if method != "GET" or not target.startswith("/api/v1/sessions?"):
            return send(self, method, target, *rest)
        body = msgspec.json.encode(told)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        return [{"status": status, "headers": headers}, {"body": body}]

    monkeypatch.setattr(World, "send", broken)
    machine = stateful.Sequences()
    try:
        machine.start()
        case = stateful.ROUTES["list_sessions"].Case(query={"limit": 5})
        with pytest.raises(BaseException, match=rule):
            machine._exchange(0, "list_sessions", case)
    finally:
        machine.teardown()
