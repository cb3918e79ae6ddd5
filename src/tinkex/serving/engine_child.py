"""The engine's process of a server: `engine.process.child`, and the decoder of training bodies.

So bodies are decoded where they are used: not on the event loop that answers requests, and not to
be pickled afterwards. The engine itself knows no encodings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.process import child
from tinkex.engine.protocol import TrainOp
from tinkex.wire.proto_training import decode_forward_backward

if TYPE_CHECKING:
    from tinkex.engine.protocol import EncodedTrainOp


def main(fd: int) -> None:
    """Serve on an inherited socket; never returns."""
    child.main(fd, decode_train_op)


def decode_train_op(op: EncodedTrainOp) -> TrainOp:
    """The operation in a protobuf body; raises InputError for anything malformed."""
    checked = decode_forward_backward(op.body).checked()
    return TrainOp(
        op_id=op.op_id,
        model_id=op.model_id,
        data=checked.data,
        loss_fn=checked.loss_fn,
        loss_fn_config=dict(checked.loss_fn_config or {}),
        backward=op.backward,
    )
