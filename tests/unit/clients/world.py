"""A client and a fake server in one loop, on one virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE_S
from tinkex import Datum, ModelInput, ServiceClient
from tinkex.clients.portal import CurrentLoop
from tinkex.clients.session import Session
from tinkex.config import Config
from tinkex.server import Settings
from tinkex.testing import FakeClock, FakeServer
from tinkex.types import ClientConfigResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

MODEL = "tinkex/tiny"


class World:
    """Everything a scenario needs; `run` gives it a loop."""

    def __init__(self, flags: dict[str, Any] | None = None, **config: Any) -> None:
        self.clock = FakeClock()
        settings = Settings(client_config=ClientConfigResponse(**(flags or {})))
        self.server = FakeServer(clock=self.clock, settings=settings)
        self.config = Config(base_url="http://fake.invalid", api_key="tml-test", **config)

    def service(self, config: dict[str, Any] | None = None, **options: Any) -> ServiceClient:
        """A client; `config` has fields that differ for it."""
        session = Session(
            replace(self.config, **(config or {})),
            clock=self.clock,
            portal=CurrentLoop(),
            transport=lambda config, clock: self.server.transport(),
            **options,
        )
        return ServiceClient.over(session)

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            failure: BaseException | None = None
            async with self.server, self.clock.running():
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        return await scenario(self)
                except BaseException as error:  # noqa: BLE001 - raised below, as it is
                    failure = error
            raise failure  # outside the groups, which would wrap it

        return asyncio.run(main())

    def routes(self, *names: str) -> list[str | None]:
        """Which of these routes were called, in order of arrival."""
        return [seen.route for seen in self.server.requests if seen.route in names]


def datum(tokens: int = 4, first: int = 1) -> Datum:
    ids = list(range(first, first + tokens))
    return Datum(
        model_input=ModelInput.from_ints(ids),
        loss_fn_inputs={"target_tokens": [i + 1 for i in ids], "weights": [1.0] * tokens},
    )
