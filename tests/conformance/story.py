"""What every story needs: where the server is, how to print values, small shared inputs."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "tml-conformance"
OTHER_KEY = "tml-other"
BASE = "tinkex/tiny"
# Smallest valid PNG header; servers that look only at the bytes' size are happy with it.
PNG = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de")
# A tensor container header: dtype 0, rank 2, dims 3 and 80.
DMEL = bytes([0, 2, 3, 80]) + bytes(8)


@dataclass
class Connection:
    """Where the server is, and how to wait for it to have seen something."""

    base_url: str
    wait_for: Callable[[str, int], None] = lambda path, count: None

    def service(self, sdk: Any, **options: Any) -> Any:
        return sdk.ServiceClient(base_url=self.base_url, api_key=KEY, **options)


@dataclass(frozen=True)
class Scenario:
    """One story, the server settings it is told under, and where it makes sense.

    `ordered` is false where requests leave at once and may arrive in any order. `fake` is
    false where the story needs something only the recorder can be made to do, `recorded`
    where the recorder, which never refuses, has nothing to say.
    """

    run: Callable[[Any, Connection], Any]
    config: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)
    polls: tuple[dict[str, Any], ...] = ()
    hold_samples: bool = False
    telemetry: bool = False
    torch: bool = False
    ordered: bool = True
    fake: bool = True
    recorded: bool = True

    @property
    def name(self) -> str:
        return self.run.__name__


def plain(value: Any) -> Any:
    """Anything an SDK returns, as JSON."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return "nan" if value != value else value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, BaseException):
        return error(value)
    return plain(_members(value))


def _members(value: Any) -> Any:
    names = _DATA_MEMBERS.get(type(value).__name__)
    if names is not None:
        return {name: getattr(value, name) for name in names}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot compare a {type(value).__name__}")


_DATA_MEMBERS = {
    "TensorData": ("dtype", "shape", "sparse_crow_indices", "sparse_col_indices", "data"),
    "ForwardBackwardOutput": ("loss_fn_output_type", "loss_fn_outputs", "metrics"),
    "SampleResponse": (
        "sequences",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "target_prompt_logprobs",
        "prompt_cache_hit_tokens",
        "prompt_alt_tokens",
    ),
    "SampledSequence": ("stop_reason", "sequence_id", "tokens", "logprobs", "topk_logprobs"),
    "PromptAltTokens": ("tokens", "logprobs"),
    # Ours always says more about a step than it has to; the names both know are compared.
    "OptimStepResponse": (),
}


KNOWN_ERRORS = {
    "APIError",
    "APIStatusError",
    "BadRequestError",
    "NotFoundError",
    "RequestFailedError",
    "TinkerError",
    "CancelledError",
    "LookupError",
    "RuntimeError",
    "TimeoutError",
    "TypeError",
    "ValueError",
}


def error(failure: BaseException) -> dict[str, Any]:
    """What `except` clauses see: the names it can be caught by."""
    names = {kind.__name__ for kind in type(failure).__mro__}
    return {"raised": sorted(names & KNOWN_ERRORS)}


def attempt(call: Callable[[], Any]) -> Any:
    """The plain result, or the error, whichever comes."""
    try:
        return plain(call())
    except (Exception, CancelledError) as failure:  # noqa: BLE001
        return error(failure)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables while a client is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def ignoring_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def text_datum(sdk: Any, tokens: list[int], **inputs: Any) -> Any:
    inputs.setdefault("target_tokens", tokens)
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def trainer(sdk: Any, to: Connection) -> tuple[Any, Any]:
    service = to.service(sdk)
    return service, service.create_lora_training_client(base_model=BASE, rank=8)


def session_of(training: Any) -> str:
    """The session a model belongs to; its id is the first part of the model's."""
    return training.model_id.split(":")[0]
