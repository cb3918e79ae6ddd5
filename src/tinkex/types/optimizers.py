"""Optimizers: the configuration of a model's optimizer, and the parameters of one step.

Both unions are open: an optimizer that this library does not know keeps all its fields.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from msgspec import Meta
from msgspec.structs import force_setattr

from tinkex.errors import InputError, InputTypeError
from tinkex.types.value import Finite, Int, NonNegative, Request, Result, Usage, is_mapping

B = TypeVar("B", bound=Request)


class OpenRequest(Request, dict=True, eq=False):
    """A request type that keeps fields it does not declare, readable as attributes."""

    __open__: ClassVar[bool] = True

    def _all_fields(self) -> dict[str, Any]:
        declared = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**declared, **self.__dict__}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._all_fields() == other._all_fields()

    def __ne__(self, other: object) -> bool:
        return not self == other  # msgspec's own compares identities

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self._all_fields().items())))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._all_fields().items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make, (type(self), self._all_fields()))

    def __copy__(self) -> Self:
        return type(self)(**self._all_fields())

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed."""
        import copy

        fields = self._all_fields()
        return type(self)(**{**(copy.deepcopy(fields) if deep else fields), **(update or {})})


def _make(kind: type[Request], fields: dict[str, Any]) -> Request:
    return kind(**fields)


class OptimizerConfigBase(OpenRequest, eq=False):
    """The optimizer of a model, of any kind."""

    type: str


class AdamOptimizerConfig(OptimizerConfigBase, eq=False):
    """AdamW, the default."""

    __open__: ClassVar[bool] = False
    type: Literal["adamw"] = "adamw"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen


class DimuonOptimizerConfig(OptimizerConfigBase, eq=False):
    """Dimuon."""

    __open__: ClassVar[bool] = False
    type: Literal["dimuon"] = "dimuon"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    version: Literal[1] = 1


class AdamParams(Request):
    """AdamW settings of one step. `grad_clip_norm` 0 means no clipping."""

    learning_rate: Finite = 0.0001
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Finite = 0.0


class OptimParamsBase(OpenRequest, eq=False):
    """Settings of one step, of any optimizer but Adam."""

    type: str


class DimuonParams(OptimParamsBase, eq=False):
    """Dimuon settings of one step. `grad_clip_norm` 0 means no clipping."""

    __open__: ClassVar[bool] = False
    type: Literal["dimuon"] = "dimuon"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    learning_rate: NonNegative
    grad_clip_norm: Finite = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9


OptimizerConfig = AdamOptimizerConfig | OptimizerConfigBase
"""The optimizer of a model."""
OptimParams = AdamParams | OptimParamsBase
"""Optimizer settings of one step."""

# msgspec cannot distinguish two structs without a tag, so fields of these types are decoded as
# plain values and `optimizer_config` / `optim_params` below pick the class.
if TYPE_CHECKING:
    OptimizerConfigField = OptimizerConfig
    OptimParamsField = OptimParamsBase
else:
    OptimizerConfigField = OptimParamsField = Any

_CONFIGS: Final[dict[str, type[OptimizerConfigBase]]] = {
    "adamw": AdamOptimizerConfig,
    "dimuon": DimuonOptimizerConfig,
}

_PARAMS: Final[dict[str, type[OptimParamsBase]]] = {"dimuon": DimuonParams}


def optimizer_config(value: Any, path: str) -> OptimizerConfigBase:
    """The config of a decoded object or of a caller's value."""
    return _pick(value, _CONFIGS, OptimizerConfigBase, path)


def set_optimizer_config(owner: Any) -> None:
    """Replace the field `optimizer_config` of a new struct by its value of the right class."""
    path = f"{type(owner).__name__}.optimizer_config"
    force_setattr(owner, "optimizer_config", optimizer_config(owner.optimizer_config, path))


def optim_params(value: Any, path: str) -> OptimParamsBase:
    """The parameters of a decoded object or of a caller's value."""
    return _pick(value, _PARAMS, OptimParamsBase, path)


def _pick(value: Any, known: dict[str, type[B]], base: type[B], path: str) -> B:
    if isinstance(value, base):
        return value
    if not is_mapping(value):
        wanted = base.__name__.removesuffix("Base")
        raise InputTypeError(f"expected {wanted}, got {type(value).__name__}", path)
    tag = value.get("type")
    kind = known.get(tag, base) if isinstance(tag, str) else base
    try:
        return kind.model_validate(value)
    except InputError as error:
        from tinkex.types.coercion import rebase

        raise rebase(error, path) from None


class OptimStepRequest(Request):
    """One optimizer step. `optim_params` may also be given by either of its wire names."""

    __adapts__: ClassVar[bool] = True

    # The wire has two names: one for Adam's parameters, one for those of every other optimizer.
    adam_params: AdamParams | None = None
    optimizer_params: OptimParamsField | None = None
    model_id: str
    seq_id: Int | None = None
    type: Literal["optim_step"] = "optim_step"

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            optim_params: OptimParams = ...,
            adam_params: OptimParams = ...,
            optimizer_params: OptimParams = ...,
            model_id: str,
            seq_id: int | None = None,
            type: Literal["optim_step"] = "optim_step",
        ) -> None: ...

    @property
    def optim_params(self) -> OptimParams:
        """The parameters, of whichever optimizer."""
        params = self.adam_params or self.optimizer_params
        assert params is not None
        return params

    @classmethod
    def __adapt__(cls, fields: dict[str, Any]) -> dict[str, Any]:
        names = ("optim_params", "adam_params", "optimizer_params")
        given = [name for name in names if fields.get(name) is not None]
        if len(given) > 1:
            raise InputError(f"the same as {given[0]}; give one", f"{cls.__name__}.{given[1]}")
        for name in names:
            params = fields.pop(name, None)
            if isinstance(params, AdamParams) or (is_mapping(params) and "type" not in params):
                fields["adam_params"] = params
            elif params is not None:
                fields["optimizer_params"] = optim_params(params, f"{cls.__name__}.{name}")
        return fields

    def __post_init__(self) -> None:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise InputTypeError("is required", "OptimStepRequest.optim_params")
        if isinstance(self.optimizer_params, dict):
            params = optim_params(self.optimizer_params, "OptimStepRequest.optimizer_params")
            force_setattr(self, "optimizer_params", params)


class OptimStepResponse(Result, eq=False):
    """Metrics of one step."""

    metrics: dict[str, float] | None = None
    usage: Usage | None = None
