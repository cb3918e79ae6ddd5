"""The clients that commands use, and lists that come in pages.

Commands are interactive, so they wait less than programs: they give up on an unreachable server
after half a minute and print a warning at once.

With nothing configured commands run on the embedded server. It keeps its data in the folder that
`tinkex serve` would use, so that one command finds the checkpoints of another.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import show_log

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import Protocol, TypeVar

    from tinkex.clients.admin import AdminClient
    from tinkex.clients.rest import RestClient
    from tinkex.clients.service import ServiceClient
    from tinkex.config import Config
    from tinkex.types import Cursor

    class _Page(Protocol):
        @property
        def cursor(self) -> Cursor | None: ...

    P = TypeVar("P", bound=_Page)
    T = TypeVar("T")

_PATIENCE_S = 30.0


@contextmanager
def service_client(model: str | None = None, *, embedded: bool = False) -> Generator[ServiceClient]:
    """A service client with the caller's settings; raises before the first request without a key.

    `model` is a base model that an embedded server must have besides its usual ones: a name on the
    hub, or `NAME=FOLDER`. `embedded` uses that server whatever is configured.
    """
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.session import Session
    from tinkex.config import EMBEDDED
    from tinkex.transport.auth import choose

    config = load_config(base_url=EMBEDDED if embedded else None)
    if config.embedded:
        config = _with_models(config, model)
    else:
        choose(config)
    with ServiceClient.over(Session(config, project_id=config.project_id)) as client:
        yield client


@contextmanager
def rest_client() -> Generator[RestClient]:
    """A REST client with the caller's settings."""
    from tinkex.clients.rest import RestClient

    with service_client() as service:
        yield RestClient(service.holder)


@contextmanager
def admin_client() -> Generator[AdminClient]:
    """An admin client with the caller's settings."""
    from tinkex.clients.admin import AdminClient

    with service_client() as service:
        yield AdminClient(service.holder)


def load_config(
    api_key: str | None = None, base_url: str | None = None, *, log_level: int = logging.WARNING
) -> Config:
    """The caller's settings; from now on warnings are printed on standard error."""
    from tinkex.config import Config

    config = Config.load(api_key=api_key, base_url=base_url)
    show_log(config.log_level or log_level)
    # No telemetry: a command is not a training program.
    return replace(
        config, bootstrap_deadline_s=_PATIENCE_S, submit_deadline_s=_PATIENCE_S, telemetry=False
    )


def _with_models(config: Config, model: str | None) -> Config:
    from tinkex.config import DATA_DIR, Config
    from tinkex.embedded import DEFAULT_MODELS

    models = dict.fromkeys(
        (*(config.embedded_models or DEFAULT_MODELS), *([model] if model else ()))
    )
    return replace(
        config,
        data_dir=config.data_dir or DATA_DIR,
        embedded_models=tuple(models),
        # Loading torch and a model takes longer than a request.
        bootstrap_deadline_s=Config().bootstrap_deadline_s,
        submit_deadline_s=Config().submit_deadline_s,
    )


def every_page(
    fetch: Callable[[int, int], P],
    items: Callable[[P], Sequence[T]],
    limit: int,
    page_size: int,
) -> Iterator[T]:
    """The first `limit` items (0: all) of a list, fetched as `fetch(limit, offset)`."""
    left, offset = limit or None, 0
    while left is None or left > 0:
        page = fetch(page_size if left is None else min(page_size, left), offset)
        found = items(page)
        yield from found[:left]
        offset += len(found)
        left = None if left is None else left - len(found)
        # An empty page ends the list, whatever total the server reports.
        if not found or page.cursor is None or offset >= page.cursor.total_count:
            return
