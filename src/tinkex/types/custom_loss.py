"""Custom losses as data: a traced function that the server can check and run."""

from typing import Any, Literal

from msgspec import field

from tinkex.types.value import Int, Request, Response

CustomLossInputRank = Literal[0, 1, 2]
"""0 a number, 1 one value per token, 2 a row per token."""

CustomLossNodeOp = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]
"""What a node of the graph does."""


class CustomLossInput(Request):
    """Name and rank of one input."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One traced operation.

    Arguments are JSON scalars and lists; anything else is an object with one member that
    names its kind, such as `{"ref": "node"}` or `{"dtype": "float32"}`.
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = field(default_factory=list[Any])
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


class CustomLossGraph(Request):
    """A traced loss, in execution order."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Request):
    """Upload a traced loss."""

    session_id: str
    custom_loss_seq_id: Int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    """Its id on the server."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
