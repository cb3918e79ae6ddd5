"""The engine's process of a server: `engine.process.child`, and the decoder of training bodies.

So bodies are decoded where they are used: not on the event loop that answers requests, and not to
be pickled afterwards. The engine itself knows no encodings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.process import child
from tinkex.engine.protocol import TrainOp
from tinkex.wire.json_requests import decode_training_request
from tinkex.wire.proto_training import decode_forward_backward
from tinkex.wire.routes import MEDIA_JSON

if TYPE_CHECKING:
    from tinkex.engine.protocol import EncodedTrainOp


def main(fd: int) -> None:
    """Serve on an inherited socket; never returns."""
    child.main(fd, decode_train_op)


def decode_train_op(op: EncodedTrainOp) -> TrainOp:
    """The operation in a body; raises InputError for anything malformed."""
    if op.media == MEDIA_JSON:
        decoded = decode_training_request(op.body, forward_only=not op.backward)
    else:
        decoded = decode_forward_backward(op.body)
    checked = decoded.checked()
    return TrainOp(
        op_id=op.op_id,
        model_id=op.model_id,
        data=checked.data,
        loss_fn=checked.loss_fn,
        loss_fn_config=dict(checked.loss_fn_config or {}),
        backward=op.backward,
        custom_loss=op.custom_loss,
    )
