"""How a record's fields are written in a column: text, JSON text, times.

Every column takes and gives the field's own Python value, so a row and a record have the
same names and the queries never convert anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from sqlalchemy import BigInteger, Double, Integer, Text
from sqlalchemy.types import TypeDecorator

from tinkex.types import OptimizerConfig
from tinkex.types.optimizers import optimizer_config
from tinkex.types.value import Value

if TYPE_CHECKING:
    from sqlalchemy import Dialect

TIME: Double[float] = Double()
WHOLE = BigInteger()
# SQLite counts rows by itself only in a column whose type is exactly INTEGER.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")


class PlainText(TypeDecorator[str]):
    """Text that both databases can hold.

    PostgreSQL refuses NUL and no database takes half a surrogate pair. Neither is part of any
    id we hand out, so what a client sends of them may be written down as something visible.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\u2400").encode(errors="replace").decode()


class Json(TypeDecorator[Any]):
    """A structured field as JSON text. `kind` is the field's type."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if isinstance(value, Value):
            return value.model_dump_json()
        plain = msgspec.json.encode(value, enc_hook=_plain)
        return plain.decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if self.kind is OptimizerConfig:
            return optimizer_config(msgspec.json.decode(value), "optimizer")
        return msgspec.json.decode(value, type=self.kind)


def _plain(value: object) -> object:
    return dict(cast("Any", value))  # the one other thing a record holds: any Mapping
