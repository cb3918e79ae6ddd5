"""Random sessions of two tenants with kills keep the rules; what broke one is tried again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.property import sessions
from tests.property.sessions import Answer, FakeDriver, planned, problem_of, read, shortened

CRASHERS = sorted((Path(__file__).parent / "crashers").glob("sessions-*"))


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_random_sessions_keep_the_rules(first: int) -> None:
    found = sessions.search(first, 25, float("inf"))
    assert found is None, found


@pytest.mark.parametrize("path", CRASHERS, ids=lambda path: path.name)
def test_what_once_broke_a_rule_keeps_it(path: Path) -> None:
    assert problem_of(read(path.read_text())) is None


def test_every_call_is_answered_with_success_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sequences would show nothing but refusals."""
    seen: Counter[tuple[str, bool]] = Counter()
    check = sessions.Story._check

    def counted(self: sessions.Story, me, other, name: str, request, answer: Answer) -> None:
        seen[name, answer.status == 200] += 1
        check(self, me, other, name, request, answer)

    monkeypatch.setattr(sessions.Story, "_check", counted)
    assert sessions.search(0, 100, float("inf")) is None
    rare = {"attach_model"}  # only to a model whose session has been silent
    assert {name for name, good in seen if good} >= set(sessions.CALLS) - rare
    assert {name for name, good in seen if not good} >= {"forward_backward", "asample"}


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (Answer(500, b"{}"), "500"),
        (Answer(200, sessions.MARKS[0].encode() + sessions.MARKS[1].encode()), "of the other"),
    ],
)
def test_a_broken_rule_is_found_and_shortened(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, rule: str
) -> None:
    send = FakeDriver.send

    async def faulty(self: FakeDriver, tenant: int, method: str, path: str, *rest) -> Answer | None:
        sent = await send(self, tenant, method, path, *rest)
        return answer if path.endswith("get_info") else sent

    monkeypatch.setattr(FakeDriver, "send", faulty)
    found = sessions.search(0, 200, float("inf"))
    assert found is not None
    assert rule in found[1]
    (only,) = shortened(planned(found[0]))
    assert only.name in ("get_info", "disconnect")


def test_an_operation_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = FakeDriver.send

    async def forgetful(self: FakeDriver, tenant: int, method: str, path: str, *rest):
        if path.endswith("retrieve_future"):
            return Answer(200, b'{"type":"try_again"}')
        return await send(self, tenant, method, path, *rest)

    monkeypatch.setattr(FakeDriver, "send", forgetful)
    found = problem_of(planned(1))
    assert found is not None
    assert "does not end" in found
