"""Shows the derived twins of a client's methods in the reference, with their signature.

A client says `sample_async = awaited(sample)`. To a reader of the source that is an attribute; this
extension of griffe makes it the method that it is.
"""

from __future__ import annotations

import griffe

# What awaiting or calling the twin gives, by the function that makes it.
_SENTENCES = {
    "blocking": "Waits for what `{name}` gives.",
    "submitting": "Starts `{name}` and returns its future at once.",
    "deferred": "Gives the future of `{name}` when awaited.",
    "awaited": "Gives the result of `{name}` when awaited.",
}


class Twins(griffe.Extension):
    """Replaces an attribute `x = blocking(x_async)` by a function like `x_async`."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Called once for each class, when its members are known."""
        for name, member in list(cls.members.items()):
            if isinstance(member, griffe.Attribute) and (found := _twin_of(cls, member)):
                maker, original = found
                cls.members[name] = _twin(name, member, maker, original)


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
        parent=member.parent,
    )
    if maker in ("deferred", "awaited"):
        twin.labels.add("async")
    twin.docstring = griffe.Docstring(_SENTENCES[maker].format(name=original.name), parent=twin)
    return twin
