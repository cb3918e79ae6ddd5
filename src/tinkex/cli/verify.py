"""Compares log-probabilities of an adapter's files, computed here, with the server's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.adapters.compare import OTHER_BASE, compare, known, mean_difference
from tinkex.cli.command_errors import CommandError
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
    from pathlib import Path

    from tinkex.adapters.compare import Comparison
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.engine.models.loader import BaseModel

    Scores = Sequence[Sequence[float]]


def load_base(source: str, name: str) -> BaseModel:
    """The base model from a folder, a file or the hub; raises a `CommandError` if it is missing."""
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
            "Name its folder, GGUF file or hub id with --base.",
        ) from error


@dataclass(frozen=True, slots=True)
class Expected:
    """Log-probabilities of texts: the server's with and without the adapter, ours without."""

    texts: Sequence[Sequence[int]]
    theirs: Scores
    their_base: Scores
    our_base: Scores

    def check(
        self, model: BaseModel, adapter: Path | None, hint: str, *, rounded: bool = False
    ) -> Comparison:
        """Compute them here with the adapter; raises a `CommandError` unless they agree."""
        from tinkex.engine.local.score import score

        try:
            ours = score(model, self.texts, adapter)
        except RequestFailedError as error:
            raise CommandError(f"The files do not fit the base model: {error}", hint) from error
        found = compare(self.theirs, self.their_base, ours, self.our_base, rounded=rounded)
        if not found.agrees:
            raise CommandError(
                f"The files do not compute what the server does: log-probabilities differ by "
                f"{found.difference:.3g} on average, {found.allowed:.3g} would be rounding, and "
                f"the adapter changes {found.effect:.3g}",
                hint,
            )
        return found


def ask(service: ServiceClient, path: str, base_model: str, model: BaseModel) -> Expected:
    """Compute the texts on the server; raises a `CommandError` if its base model differs."""
    from tinkex.engine.local.score import score, texts_for

    texts = texts_for(model)
    say(f"Comparing with {path} on {sum(map(len, texts))} tokens …")
    their_base = _scores(service.create_sampling_client(base_model=base_model), texts)
    our_base = score(model, texts)
    apart = mean_difference(their_base, our_base)
    if apart > OTHER_BASE:
        raise CommandError(
            f"{base_model} is another model here than on the server: log-probabilities differ by "
            f"{apart:.3g} on average, without any adapter",
            "Name the right one with --base.",
        )
    return Expected(texts, _adapted(service, path, texts), their_base, our_base)


def _adapted(service: ServiceClient, path: str, texts: Sequence[Sequence[int]]) -> Scores:
    """The checkpoint's log-probabilities; if it cannot be sampled, those of sampler weights."""
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
    """Delete a checkpoint that must not be used; the caller raises another error anyway."""
    from tinkex.clients.rest import RestClient

    with suppress(APIStatusError):
        RestClient(service.holder).delete_checkpoint_from_tinker_path(path).result()
