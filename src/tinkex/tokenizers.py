"""Tokenizers: which one belongs to a model, and loading it.

`plan` decides by name alone what to load; loading runs in a thread, because it reads files and
may download. `transformers` is used where it is installed, else the small `tokenizers` library.

A tinkex server has the tokenizers of its base models. A server on this machine is asked first,
since it knows which tokenizer it uses. For other servers the hub comes first, as in official
clients, and the server is asked when the hub has failed.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tinkex import urls
from tinkex.errors import APIStatusError, BadRequestError, InputError, TokenizerError
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.clients.service import ServiceClient
    from tinkex.transport.api import Api
    from tinkex.wire.bodies import TokenizerResponse

_UNGATED_LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
_VENDOR_PREFIXES = ("TML/", "thinkingmachines/")
# These repositories carry their own code, so each is pinned to a commit that was reviewed.
_PINNED = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
_ALIASES = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATE = "chat_template.jinja"
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})


class Tokenizer(Protocol):
    """What every tokenizer has, whichever library it comes from."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What to load: a folder, or a repository at a revision.

    `stamp` is when a folder was last written, so that a new version is not taken for an old one.
    """

    name: str
    revision: str | None = None
    local: bool = False
    stamp: int = 0


async def load_tokenizer_async(model_name: str, tokenizer_id: str | None = None) -> Tokenizer:
    """The tokenizer of a model, loaded without blocking the caller's loop."""
    return await asyncio.to_thread(load_tokenizer, model_name, tokenizer_id)


def load_tokenizer(model_name: str, tokenizer_id: str | None = None) -> Tokenizer:
    """The tokenizer of a model; the last 32 are kept."""
    return _load(plan(model_name, tokenizer_id))


def plan(model_name: str, tokenizer_id: str | None = None) -> TokenizerSource:
    """What to load: an existing local folder, else the server's choice, else by the name."""
    if not model_name:
        raise InputError("must not be empty", "model_name")
    for name in (model_name, tokenizer_id):
        folder = _folder(name) if name else None
        if folder is not None:
            return folder
    name = tokenizer_id or _by_model_name(model_name.split(":")[0])
    if name.startswith("tinkex/"):
        # These names are on no hub; asking for one would take a minute and fail.
        raise TokenizerError(
            f"{name} is on no hub: only a tinkex server that serves it has its tokenizer; run "
            "`tinkex serve`, or use the embedded server"
        )
    name = _ALIASES.get(name, name)
    return TokenizerSource(name, _PINNED.get(name))


def _by_model_name(name: str) -> str:
    if name.startswith("meta-llama/Llama-3"):
        return _UNGATED_LLAMA_3
    if name.count("/") == 2:
        organisation, model, _variant = name.split("/")
        return f"{organisation}/{model}"
    return name


def _folder(name: str) -> TokenizerSource | None:
    """`name` as a local folder that holds a tokenizer."""
    folder = Path(name)
    try:
        stamps = [path.stat().st_mtime_ns for file in _FILES if (path := folder / file).is_file()]
    except (OSError, ValueError):  # too long a name, a null byte: no folder
        return None
    return TokenizerSource(str(folder.resolve()), local=True, stamp=max(stamps)) if stamps else None


@functools.lru_cache(maxsize=32)
def _load(source: TokenizerSource) -> Tokenizer:
    if not source.local and source.name.startswith(_VENDOR_PREFIXES):
        found = _from_vendor(source.name)
        if found is not None:
            return found
    for library, read in (("transformers", _from_transformers), ("tokenizers", _from_tokenizers)):
        module = _installed(library)
        if module is None:
            continue
        try:
            return read(module, source)
        except TokenizerError:
            raise
        except Exception as error:
            # Both libraries raise errors of any type, bare Exception included.
            where = "the folder" if source.local else "the hub or its local cache"
            raise TokenizerError(
                f"the tokenizer {source.name!r} could not be read from {where}: {error}"
            ) from error
    raise TokenizerError(
        f"loading the tokenizer {source.name!r} needs `pip install 'tinkex[tokenizers]'` or "
        "`pip install transformers`"
    )


def _installed(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        return None


def _from_vendor(name: str) -> Tokenizer | None:
    vendor = _installed("tml_tokenizers.tinker_tokenizers")
    if vendor is None:
        raise TokenizerError(
            f"the tokenizer {name!r} is not on any hub; install the vendor's package "
            "tml_tokenizers, or build prompts with tml-renderers"
        )
    found: Tokenizer | None = vendor.get_tinker_tokenizer(name)
    return found


def _from_transformers(transformers: Any, source: TokenizerSource) -> Tokenizer:
    options: dict[str, Any] = {}
    if source.revision is not None:
        options = {"revision": source.revision, "trust_remote_code": True}
    loaded: Tokenizer = transformers.AutoTokenizer.from_pretrained(source.name, **options)
    return loaded


def _from_tokenizers(tokenizers: Any, source: TokenizerSource) -> Tokenizer:
    folder = Path(source.name) if source.local else _downloaded(source)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{source.name!r} has no tokenizer.json, which is all `tokenizers` reads; "
            "`pip install transformers` can load it"
        )
    return FastTokenizer(source.name, tokenizers.Tokenizer.from_file(str(file)), _settings(folder))


def _downloaded(source: TokenizerSource) -> Path:
    # The hub's client is a dependency of `tokenizers`.
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(
        hub.snapshot_download(
            source.name,
            revision=source.revision,
            allow_patterns=["tokenizer*.json", _TEMPLATE],
        )
    )


def _settings(folder: Path) -> dict[str, Any]:
    import msgspec

    settings: dict[str, Any] = {}
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        text = (folder / "tokenizer_config.json").read_bytes()
        settings = msgspec.json.decode(text, type=dict[str, Any])
    # Newer folders keep the template in a file of its own.
    with suppress(OSError, UnicodeDecodeError):
        settings["chat_template"] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    return settings


class FastTokenizer:
    """A tokenizer without `transformers`: text to ids and back; `tinkex.chat` renders chats."""

    def __init__(self, name: str, fast: Any, settings: Mapping[str, Any]) -> None:
        self.name_or_path = name
        self._fast = fast
        self._settings = settings

    @property
    def vocab_size(self) -> int:
        """Ids of the model's own vocabulary, without tokens added later."""
        return int(self._fast.get_vocab_size(with_added_tokens=False))

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, where the tokenizer names one."""
        return self._special("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, where the tokenizer names one."""
        return self._special("bos_token")

    @property
    def chat_template(self) -> str | None:
        """The model's own template for conversations, where it brings one."""
        found: Any = self._settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = cast("list[dict[str, Any]]", found)
            found = next((one["template"] for one in named if one.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; numpy and torch values are taken too."""
        ids = [int(token) for token in token_ids]
        return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, *args: object, **kwargs: object) -> list[int]:
        """Not without `transformers`; `tinkex.chat.Renderer` does what it is used for."""
        raise TokenizerError(
            "apply_chat_template needs `pip install transformers`, whose tokenizer get_tokenizer() "
            "then returns; tinkex.chat.Renderer.of(tokenizer).prompt(messages) does without"
        )

    def __len__(self) -> int:
        """All ids, those of added tokens included."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def __repr__(self) -> str:
        return f"FastTokenizer({self.name_or_path!r}, {len(self)} ids)"

    def _special(self, role: str) -> int | None:
        # Older files hold an object where newer ones hold the text.
        token: Any = self._settings.get(role)
        text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
        return self._fast.token_to_id(text) if isinstance(text, str) else None


# -- from the server --------------------------------------------------------------------------


async def tokenizer_for_async(
    service: ServiceClient, model: str, *, elsewhere: bool = False
) -> Tokenizer:
    """The tokenizer of a base model, with its chat template; starts no session and no run.

    From the server where it has it (tinkex servers do), else from a folder or the hub by the
    model's name. A model that a tinkex server on this machine does not serve is refused, unless
    `elsewhere` says that only the tokenizer is wanted.
    """

    async def load() -> Tokenizer:
        return await tokenizer_of(await service.holder.connected(), model, elsewhere=elsewhere)

    return await service.operations.run(load)


def tokenizer_for(service: ServiceClient, model: str, *, elsewhere: bool = False) -> Tokenizer:
    """The tokenizer of a base model; `tokenizer_for_async` for blocking code."""
    return service.operations.block(
        lambda: tokenizer_for_async(service, model, elsewhere=elsewhere)
    )


async def tokenizer_of(
    api: Api, model_name: str, tokenizer_id: str | None = None, *, elsewhere: bool = False
) -> Tokenizer:
    """The tokenizer of a model that `api`'s server serves.

    With `elsewhere` also of a model that it does not serve. For a model that is found nowhere, the
    error is the server's, which lists what it serves.
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
        return None  # a server without this route
    return await asyncio.to_thread(_made, model_name, answer)


def _made(model_name: str, answer: TokenizerResponse) -> Tokenizer | None:
    """The tokenizer in the form of whichever library is here; None without any."""
    library = _installed("tokenizers")
    if library is None:
        return None
    fast = library.Tokenizer.from_str(answer.tokenizer)
    special = {"bos_token": answer.bos_token, "eos_token": answer.eos_token}
    transformers = _installed("transformers")
    if transformers is None:
        return FastTokenizer(model_name, fast, {**special, "chat_template": answer.chat_template})
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, chat_template=answer.chat_template, **special
    )
    made.name_or_path = model_name
    return cast("Tokenizer", made)
