"""Both SDKs tell the same stories to the same server: it sees the same, and so do they."""

from __future__ import annotations

import json
import re
import select
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compare
import pytest
from recorder import describe
from scenarios import SCENARIOS

from tests.patience import PATIENCE_S
from tinkex.server import Settings
from tinkex.testing import FakeServer
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

    from interpreters import Interpreters
    from story import Scenario

pytestmark = [pytest.mark.official]

RUNNER = str(Path(__file__).with_name("run_scenarios.py"))
STORIES = [pytest.param(story, id=story.name) for story in SCENARIOS if story.fake]
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)")


class Teller:
    """One SDK in an interpreter of its own, which tells stories on demand."""

    def __init__(self, program: Popen[str]) -> None:
        self._program = program

    def start(self, story: Scenario, base_url: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps({"name": story.name, "base_url": base_url}) + "\n")
        self._program.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._program.stdout is not None
        ready, _, _ = select.select([self._program.stdout], [], [], PATIENCE_S)
        assert ready, "no answer in time"
        line = self._program.stdout.readline()
        assert line, self._program.communicate()[1][-4000:]
        return json.loads(line)


@pytest.fixture(scope="module")
def tellers(
    interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Teller]]:
    home = tmp_path_factory.mktemp("home")
    programs = {
        sdk: interpreters.start(python, [RUNNER, sdk, "--on-demand"], home=home)
        for sdk, python in (("tinker", interpreters.official), ("tinkex", interpreters.cookbook))
    }
    yield {sdk: Teller(program) for sdk, program in programs.items()}
    for program in programs.values():
        program.communicate(timeout=PATIENCE_S)


def new_server(story: Scenario) -> FakeServer:
    settings = Settings(
        client_config=ClientConfigResponse(**story.config),
        dynamic_config=ClientDynamicConfigResponse(**story.dynamic),
    )
    return FakeServer(settings=settings)


def seen(server: FakeServer) -> list[compare.Request]:
    return [
        describe(
            request.method, f"{request.path}?{request.query}", request.headers, request.raw_body
        )[0]
        for request in server.requests
    ]


def steady(value: Any) -> Any:
    """A result without what no two servers share: times, signed addresses, and cache hits, which
    depend on which of several samples sent at once arrives first.
    """
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name != "prompt_cache_hit_tokens"}
        return {name: steady(item) for name, item in kept.items()}
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, str) and value.startswith("http"):
        return "<address>"
    return TIME.sub("<time>", value) if isinstance(value, str) else value


@pytest.mark.parametrize("story", STORIES)
def test_both_sdks_see_the_same_and_say_the_same(
    story: Scenario, tellers: dict[str, Teller]
) -> None:
    official, ours = new_server(story), new_server(story)
    with official.serve(), ours.serve():
        tellers["tinker"].start(story, official.url)
        tellers["tinkex"].start(story, ours.url)
        answers = {sdk: teller.answer() for sdk, teller in tellers.items()}
    failures = {sdk: answer["failure"] for sdk, answer in answers.items() if "failure" in answer}
    assert not failures, "\n".join(failures.values())
    result, expected = answers["tinkex"]["result"], answers["tinker"]["result"]
    assert compare.result_differences(steady(result), steady(expected)) == []
    said, heard = compare.submissions(seen(ours)), compare.submissions(seen(official))
    # What leaves at once arrives in any order; the recordings check the order where there is one.
    assert Counter(said) == Counter(heard), compare.differences(said, heard)
    polled, expected_polls = compare.repeated(seen(ours)), compare.repeated(seen(official))
    assert polled == expected_polls, compare.differences(polled, expected_polls)
