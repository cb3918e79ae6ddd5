"""The base classes of every wire value, and `Usage`, which most results carry.

`Request` and `Response` are frozen, keyword-only msgspec structs that also check their
arguments when constructed. The check is one `msgspec.convert` of the keywords, so it costs
about as much as the plain constructor. Only when that fails, `coercion` looks closer: it accepts
numpy scalars and nested dicts, or says which argument is wrong and why.

Decoding does not come through here: msgspec builds decoded structs itself, already checked,
and skips members it does not know.
"""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from datetime import datetime
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Self,
    TypeGuard,
    dataclass_transform,
)

import msgspec
from msgspec import Meta, ValidationError, convert

from tinkex.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LARGEST: Final = 1.7976931348623157e308
# Array scalars look like mappings to msgspec, which then fails on what they lack.
CONVERSION_ERRORS: Final = (
    ValidationError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# The types that `convert` takes exactly as a caller means them. It accepts others too readily:
# nested dicts lose misspelt keys, sets lose their order, and an array counts as a struct without
# any of its fields.
_SURE: Final = frozenset({str, int, float, bool, NoneType, bytes, datetime})

Token = Annotated[int, Meta(ge=0, lt=2**31)]
"""A token id as the wire can carry it."""
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that JSON readers everywhere can hold."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An integer that cannot be negative."""
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
"""A number that is neither NaN nor infinite, so that JSON can carry it."""

NonNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
"""A finite number that cannot be negative."""


class FrozenValueError(InputError, FrozenInstanceError):
    """A field was assigned. A ValueError and an AttributeError: programs catch either."""

    code = "frozen_value"


def _refuse_change(self: Any, name: str, *_: object) -> None:
    raise FrozenValueError(
        f"values cannot be changed; make a changed copy with model_copy(update={{{name!r}: ...}})",
        f"{type(self).__name__}.{name}",
    )


@dataclass(frozen=True, slots=True)
class ModelField:
    """What a type says about one of its fields. `default` is `...` where there is none."""

    annotation: Any
    default: Any = ...

    def is_required(self) -> bool:
        """Whether the constructor must be given it."""
        return self.default is ...


class ModelFields:
    """Gives each class its fields by name; the tag of a union's member is one of them."""

    def __get__(self, value: object, cls: "type[Value]") -> dict[str, ModelField]:
        fields: dict[str, ModelField] = _dumping().fields_of(cls)
        return dict(fields)


class ValueMeta(msgspec.StructMeta):
    """Makes structs frozen and keyword-only, and checks what they are constructed from."""

    if not TYPE_CHECKING:  # the synthesized signatures must stay visible to type checkers

        def __new__(mcls, name, bases, namespace, **config):
            cls = super().__new__(
                mcls, name, bases, namespace, **{"frozen": True, "kw_only": True, **config}
            )
            tag_field = cls.__struct_config__.tag_field
            cls.__accepts__ = frozenset(cls.__struct_fields__)
            if tag_field is not None:
                # The tag is not a stored field; reading `.type` still works.
                setattr(cls, tag_field, cls.__struct_config__.tag)
            # msgspec's own refusal, set on each class, is only an AttributeError.
            cls.__setattr__ = cls.__delattr__ = _refuse_change
            return cls

        def __call__(cls, *args, **fields):
            if args or not fields.keys() <= cls.__accepts__ or cls.__adapts__:
                return _coercion().build(cls, args, fields)
            for value in fields.values():
                kind = value.__class__
                if kind is list or kind is tuple:
                    unsure = value and dict in (value[0].__class__, value[-1].__class__)
                else:
                    unsure = kind not in _SURE and kind.__class__ is not ValueMeta
                if unsure:
                    return _coercion().build(cls, args, fields)
            try:
                return convert(fields, cls)
            except CONVERSION_ERRORS:
                return _coercion().build(cls, args, fields)


def is_mapping(value: Any) -> "TypeGuard[Mapping[Any, Any]]":
    """Whether `value` is a dict or behaves like one."""
    return isinstance(value, Mapping)


def _coercion() -> Any:
    # Imported when first needed: most programs never need it.
    from tinkex.types import coercion

    return coercion


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, metaclass=ValueMeta, frozen=True, kw_only=True):
    """The base class of requests and responses."""

    __accepts__: ClassVar[frozenset[str]] = frozenset()
    __adapts__: ClassVar[bool] = False
    __strict__: ClassVar[bool] = False

    @classmethod
    def __adapt__(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Rewrite constructor keywords before they are checked; needs `__adapts__`."""
        return fields

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Make one from a mapping (or return `obj` when it is one already)."""
        value: Self = _coercion().validate(cls, obj)
        return value

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray) -> Self:
        """Make one from JSON text."""
        try:
            return cls.model_validate(msgspec.json.decode(json_data))
        except msgspec.DecodeError as error:
            raise InputError(f"not valid JSON: {error}", cls.__name__) from error
        except TypeError as error:
            if isinstance(error, InputError):
                raise
            raise InputTypeError("expected JSON text or bytes", cls.__name__) from error

    @classmethod
    def model_construct(cls, _fields_set: "set[str] | None" = None, **fields: Any) -> Self:
        """The same as the constructor: values that cannot be sent are refused here, too."""
        return cls(**fields)

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: "Iterable[str] | None" = None,
        exclude: "Iterable[str] | None" = None,
        by_alias: bool | None = None,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        round_trip: bool = False,
        warnings: bool | str = True,
    ) -> dict[str, Any]:
        """The fields as a dict of plain values; `mode="json"` leaves only what JSON has.

        `exclude_none` leaves out declared fields that are None. Nulls inside free-form maps
        stay. `exclude_unset` means the same as `exclude_defaults`: a value does not remember
        which of its fields were given. `by_alias`, `round_trip` and `warnings` change nothing.
        """
        defaults = exclude_unset or exclude_defaults
        options = _dumping().Options(mode == "json", exclude_none, defaults)
        fields: dict[str, Any] = _dumping().dump(self, options)
        return _dumping().selected(fields, include, exclude, type(self).__name__)

    def model_dump_json(
        self,
        *,
        indent: int | None = None,
        include: "Iterable[str] | None" = None,
        exclude: "Iterable[str] | None" = None,
        by_alias: bool | None = None,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        round_trip: bool = False,
        warnings: bool | str = True,
    ) -> str:
        """The fields as JSON text; the options are those of `model_dump`."""
        fields = self.model_dump(
            mode="json",
            include=include,
            exclude=exclude,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
        )
        text = msgspec.json.encode(fields)
        if indent is not None:
            text = msgspec.json.format(text, indent=indent)
        return text.decode()

    model_fields: "ClassVar[ModelFields]" = ModelFields()

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that are not at their defaults."""
        return set(self.model_dump(exclude_unset=True))

    def __iter__(self) -> "Iterator[tuple[str, Any]]":
        """Names and values, so that `dict(value)` works."""
        pairs = [(name, getattr(self, name)) for name in type(self).model_fields]
        pairs = [pair for pair in pairs if pair != ("usage", None)]
        return iter([*pairs, *getattr(self, "__dict__", {}).items()])

    def model_copy(self, *, update: "dict[str, Any] | None" = None, deep: bool = False) -> Self:
        """A copy with some fields changed; the changes are checked like constructor arguments."""
        import copy

        source = copy.deepcopy(self) if deep else self
        fields = {name: getattr(source, name) for name in self.__struct_fields__}
        return type(self)(**{**fields, **(update or {})})

    def __replace__(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)

    def _repr_with(self, **shown: str) -> str:
        """The usual repr with other text for some fields: secrets, and data too long to read."""
        fields = (
            (name, shown.get(name) or repr(getattr(self, name))) for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in fields)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Lets these types be fields of pydantic models."""
        from pydantic_core import core_schema

        return pydantic_schema(core_schema, cls.model_validate, lambda value: value.model_dump())


def pydantic_schema(
    core_schema: Any, validate: "Callable[[Any], Any]", serialize: "Callable[[Any], Any]"
) -> Any:
    """A pydantic schema that calls `validate` on the way in and `serialize` on the way out."""
    return core_schema.no_info_plain_validator_function(
        validate, serialization=core_schema.plain_serializer_function_ser_schema(serialize)
    )


def _dumping() -> Any:
    from tinkex.types import dumping

    return dumping


class Request(Value):
    """Something the client sends: unknown keywords are refused."""

    __strict__: ClassVar[bool] = True


class Response(Value):
    """Something the server answers: unknown members are ignored when decoded."""


class Result(Response, eq=False):
    """A response that may say what it cost. `usage` takes no part in comparisons."""

    def _identity(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "usage")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._identity() == other._identity()

    def __ne__(self, other: object) -> bool:
        return not self == other  # msgspec's own compares identities

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))


class Usage(Response):
    """Tokens and time of one operation; `+` adds two of them up."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    generated_tokens: Count = 0
    trained_tokens: Count = 0
    queue_s: float | None = None
    device_s: float | None = None

    def __add__(self, other: object) -> "Usage":
        if not isinstance(other, Usage):
            return NotImplemented
        queue_s, device_s = other.queue_s, other.device_s  # None where a time is not known
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
            trained_tokens=self.trained_tokens + other.trained_tokens,
            queue_s=self.queue_s if queue_s is None else queue_s + (self.queue_s or 0.0),
            device_s=self.device_s if device_s is None else device_s + (self.device_s or 0.0),
        )
