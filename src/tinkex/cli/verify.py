"""Comparing files on this machine with what a server computes, before a command says "done"."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.adapters.compare import compare, known
from tinkex.cli.failures import CommandError
from tinkex.cli.output import say
from tinkex.errors import (
    APIStatusError,
    InputError,
    MissingPackageError,
    ModelError,
    RequestFailedError,
)
from tinkex.types import ModelInput, ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.adapters.compare import Comparison
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.engine.models.loader import BaseModel

    Scores = Sequence[Sequence[float]]


def load_base(source: str, name: str) -> BaseModel:
    """The base model, from a folder, a file or the hub; raises a `CommandError` without it."""
    try:
        from tinkex.engine.models.loader import load_model
    except ImportError as error:
        raise MissingPackageError(
            "comparing the files needs the engine", "'tinkex[engine]'"
        ) from error
    say(f"Loading {source} to compare …")
    try:
        return load_model(source, name=name)
    except (ModelError, InputError) as error:
        raise CommandError(
            f"The base model cannot be loaded: {error}",
            "Give its folder, GGUF file or hub id by --base.",
        ) from error


@dataclass(frozen=True, slots=True)
class Expected:
    """What the server computes for some texts, with the adapter and without."""

    texts: Sequence[Sequence[int]]
    adapted: Scores
    base: Scores

    def compare(self, ours: Scores, our_base: Scores, *, rounded: bool = False) -> Comparison:
        """How far the files are from the server."""
        return compare(self.adapted, self.base, ours, our_base, rounded=rounded)


def ask(
    service: ServiceClient, path: str, base_model: str, texts: Sequence[Sequence[int]]
) -> Expected:
    """Have the server compute the texts."""
    say(f"Comparing with {path} on {sum(map(len, texts))} tokens …")
    base = _scores(service.create_sampling_client(base_model=base_model), texts)
    return Expected(texts, _adapted(service, path, texts), base)


def _adapted(service: ServiceClient, path: str, texts: Sequence[Sequence[int]]) -> Scores:
    """What a checkpoint computes; where only sampler weights are sampled from, by way of those."""
    kind = ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type
    refused: Exception | None = None
    try:
        return _scores(service.create_sampling_client(model_path=path), texts)
    except (APIStatusError, RequestFailedError) as error:
        if kind == "sampler":
            raise
        refused = error
    if kind == "external":
        raise CommandError(
            f"The server does not sample from {path}, so there is nothing to compare with",
            "Export the training checkpoint that it was made from instead.",
        ) from refused
    training = service.create_training_client_from_state(path)
    return _scores(training.save_weights_and_get_sampling_client(), texts)


def _scores(sampler: SamplingClient, texts: Sequence[Sequence[int]]) -> Scores:
    asked = [sampler.compute_logprobs(ModelInput.from_ints(list(tokens))) for tokens in texts]
    return [known(answer.result()) for answer in asked]


def check(found: Comparison, hint: str) -> None:
    """Raise unless the two computations agree."""
    if not found.same_base:
        raise CommandError(
            f"This base model is not the one of the server: log-probabilities differ by "
            f"{found.base_difference:.3g} without any adapter",
            "Give the right one by --base.",
        )
    if not found.agrees:
        raise CommandError(
            f"The files do not compute what the server does: log-probabilities differ by "
            f"{found.difference:.3g} on average, {found.allowed:.3g} would be rounding, and the "
            f"adapter changes {found.effect:.3g}",
            hint,
        )


def shown(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON."""
    return {
        "tokens": found.tokens,
        "difference": found.difference,
        "allowed": found.allowed,
        "adapter_effect": found.effect,
        "base_difference": found.base_difference,
    }


def delete_quietly(service: ServiceClient, path: str) -> None:
    """Delete a checkpoint that must not be used; another error is on its way already."""
    from tinkex.clients.rest import RestClient

    with suppress(APIStatusError):
        RestClient(service.holder).delete_checkpoint_from_tinker_path(path).result()
