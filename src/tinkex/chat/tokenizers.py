"""The tokenizer of a model, from whichever server a program talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.tokenizers import tokenizer_of

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.tokenizers import Tokenizer


async def tokenizer_for_async(
    service: ServiceClient, model: str, *, elsewhere: bool = False
) -> Tokenizer:
    """The tokenizer of a base model, with its chat template; starts no session and no run.

    From the server where it has it (ours do), else from a folder or the hub by the model's name.
    A model that a server of ours on this machine does not serve is refused, unless `elsewhere`
    says that the tokenizer alone is wanted.
    """

    async def load() -> Tokenizer:
        return await tokenizer_of(await service.holder.connected(), model, elsewhere=elsewhere)

    return await service.operations.run(load)


def tokenizer_for(service: ServiceClient, model: str, *, elsewhere: bool = False) -> Tokenizer:
    """The tokenizer of a base model; `tokenizer_for_async` for blocking code."""
    return service.operations.block(
        lambda: tokenizer_for_async(service, model, elsewhere=elsewhere)
    )
