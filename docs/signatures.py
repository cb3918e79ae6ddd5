"""Shows in the reference what the source says in fewer words; an extension of griffe.

A client says `sample_async = awaited(sample)`: shown as the method that it is. A value of
`tinkex.types` lists its fields: shown as the arguments it is made with. A package lists its public
names in `__init__.pyi`: shown as if they were its `__all__`.
"""

from __future__ import annotations

from pathlib import Path

import griffe

# What calling or awaiting a twin gives, by the function that makes it.
_SENTENCES = {
    "blocking": "Waits for what `{name}` gives.",
    "submitting": "Starts `{name}` and returns its future at once.",
    "deferred": "Gives the future of `{name}` when awaited.",
    "awaited": "Gives the result of `{name}` when awaited.",
}
_VALUES = "tinkex.types."


class Signatures(griffe.Extension):
    """Gives derived methods and plain values their signatures, and packages their names."""

    def on_module_members(self, *, mod: griffe.Module, **_: object) -> None:
        """Called once for each file, when its names are known."""
        if isinstance(mod.filepath, Path) and mod.filepath.name == "__init__.pyi":
            mod.exports = list(mod.members)

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Called once for each class, when its members are known."""
        for name, member in list(cls.members.items()):
            if isinstance(member, griffe.Attribute) and (found := _twin_of(cls, member)):
                cls.set_member(name, _twin(name, member, *found))
        if cls.path.startswith(_VALUES) and "__init__" not in cls.members:
            cls.set_member("__init__", griffe.Function("__init__", parameters=_fields(cls)))


def _twin_of(cls: griffe.Class, member: griffe.Attribute) -> tuple[str, griffe.Function] | None:
    """The maker and the method it was called with, if the attribute is such a call."""
    call = member.value
    if not isinstance(call, griffe.ExprCall) or str(call.function) not in _SENTENCES:
        return None
    original = cls.members.get(str(call.arguments[0]))
    return (str(call.function), original) if isinstance(original, griffe.Function) else None


def _twin(
    name: str, member: griffe.Attribute, maker: str, original: griffe.Function
) -> griffe.Function:
    twin = griffe.Function(
        name,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parameters=original.parameters,
        returns=_returned(maker, str(original.returns)),
    )
    if maker in ("deferred", "awaited"):
        twin.labels.add("async")
    twin.docstring = griffe.Docstring(_SENTENCES[maker].format(name=original.name), parent=twin)
    return twin


def _returned(maker: str, original: str) -> str:
    if maker == "submitting":
        return f"APIFuture[{original}]"
    if maker == "awaited":
        return original.removeprefix("APIFuture[").removesuffix("]")
    return original


def _fields(cls: griffe.Class) -> griffe.Parameters:
    """The annotated attributes of a class, as keyword arguments."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                annotation=member.annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=member.value,
            )
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and _is_field(member)
        )
    )


def _is_field(member: griffe.Attribute) -> bool:
    shown = member.annotation is not None and not member.name.startswith("_")
    return shown and "ClassVar" not in str(member.annotation)
