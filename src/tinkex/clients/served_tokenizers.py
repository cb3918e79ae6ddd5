"""Tokenizers from the server: one of ours has those of its base models, so no hub is needed.

A server on this machine is asked first, since it knows exactly what it computes with. Elsewhere
the hub comes first, as official clients do it, and the server is asked when the hub has failed.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any, cast

from tinkex.clients.tokenizers import FastTokenizer, load_tokenizer_async
from tinkex.errors import APIStatusError, BadRequestError, TokenizerError
from tinkex.transport import urls
from tinkex.wire import routes

if TYPE_CHECKING:
    from tinkex.clients.tokenizers import Tokenizer
    from tinkex.transport.api import Api
    from tinkex.wire.bodies import TokenizerResponse

_HERE = frozenset({"127.0.0.1", "localhost", "::1"})


async def tokenizer_of(
    api: Api, model_name: str, tokenizer_id: str | None = None, *, elsewhere: bool = False
) -> Tokenizer:
    """The tokenizer of a model that `api`'s server serves.

    With `elsewhere` also of a model that it does not serve. Of a model that nobody has, the error
    is the server's, which says what it serves.
    """
    here = urls.parse(api.config.base_url).host in _HERE
    refused: BadRequestError | None = None
    if here:
        try:
            served = await _served(api, model_name)
        except BadRequestError as error:
            if not elsewhere:
                raise
            refused, served = error, None
        if served is not None:
            return served
    try:
        return await load_tokenizer_async(model_name, tokenizer_id)
    except TokenizerError as error:
        if refused is not None:
            raise refused from error
        served = None if here else await _served(api, model_name)
        if served is None:
            raise
        return served


async def _served(api: Api, model_name: str) -> Tokenizer | None:
    """The server's own; raises a `BadRequestError` if it says that it does not serve the model."""
    try:
        answer = await api.call(routes.GET_TOKENIZER, query={"base_model": model_name})
    except BadRequestError:
        raise
    except APIStatusError:
        return None  # a server that has none, or is none of ours
    return await asyncio.to_thread(_made, model_name, answer)


def _made(model_name: str, answer: TokenizerResponse) -> Tokenizer | None:
    """The tokenizer in the form of whichever library is here; None without any."""
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError:
        return None
    fast = library.Tokenizer.from_str(answer.tokenizer)
    special = {"bos_token": answer.bos_token, "eos_token": answer.eos_token}
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return FastTokenizer(model_name, fast, {**special, "chat_template": answer.chat_template})
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, chat_template=answer.chat_template, **special
    )
    made.name_or_path = model_name
    return cast("Tokenizer", made)
