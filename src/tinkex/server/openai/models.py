"""Model names: what can be sampled from, and the weights of each name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.engine.protocol import Weights
from tinkex.errors import NotFoundError, shortened
from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import live_checkpoints, readable, readers
from tinkex.server.openai.errors import problem
from tinkex.server.scheduler.checkpoints import check_sampleable

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.engine.protocol import ModelSpec
    from tinkex.server.api.call import Call
    from tinkex.server.store.records import StoredCheckpoint

_PATH = "tinker://"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The base model and weights of a name."""

    name: str
    spec: ModelSpec
    weights: Weights
    checkpoint: StoredCheckpoint | None = None


async def choose(call: Call, name: str) -> Chosen:
    """The weights that a caller may sample from under this name; a 404 for any other."""
    if not name.startswith(_PATH):
        return Chosen(name, await _spec(call, name, name), Weights(base_model=name))
    try:
        checkpoint = await readable(call, name, await readers(call, None))
    except NotFoundError:
        raise _unknown(name) from None
    check_sampleable(checkpoint)
    weights = Weights(base_model=checkpoint.base_model, location=checkpoint.location)
    return Chosen(name, await _spec(call, checkpoint.base_model, name), weights, checkpoint)


async def list_models(call: Call) -> Response:
    """The base models, and the caller's checkpoints."""
    served = {spec.name: spec for spec in call.base_models}
    base = [_described(Chosen(n, spec, Weights(base_model=n))) for n, spec in served.items()]
    own = [
        _described(Chosen(c.path, served[c.base_model], Weights(base_model=c.base_model), c))
        for c in await live_checkpoints(call)
        if c.base_model in served and c.age_recipients is None
    ]
    return reply({"object": "list", "data": [*base, *own]})


async def get_model(call: Call) -> Response:
    """One of them."""
    return reply(_described(await choose(call, call.param("model"))))


def _described(chosen: Chosen) -> dict[str, Any]:
    checkpoint = chosen.checkpoint
    return {
        "id": chosen.name,
        "object": "model",
        "created": 0 if checkpoint is None else int(checkpoint.created_at),
        "owned_by": "tinkex" if checkpoint is None else checkpoint.owner,
        # Not OpenAI's; other servers with adapters have the same field.
        "parent": None if checkpoint is None else checkpoint.base_model,
        "max_model_len": chosen.spec.max_context_length,
    }


async def _spec(call: Call, base_model: str, name: str) -> ModelSpec:
    spec = await call.find_base_model(base_model)
    if spec is None and not call.base_models:
        raise problem(503, "The engine is starting; try again.", headers={"retry-after": "1"})
    if spec is None:
        raise _unknown(name)
    await call.at_engine(base_model)
    return spec


def _unknown(name: str) -> Exception:
    return problem(
        404,
        f"The model '{shortened(name)}' does not exist or is not yours. GET /v1/models lists what "
        "there is.",
        param="model",
        code="model_not_found",
    )
