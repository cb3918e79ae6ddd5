"""Writes `tinkex_pb2.py` and its stub from `proto/tinkex.proto`; run after editing that file.

    python tools/generate_proto.py

Only the descriptor comes from the protobuf compiler (any `grpcio-tools`). Code that the
compiler writes refuses to load with an older runtime than its own and with much newer ones;
a descriptor loads with every runtime, and comes out the same from every compiler version.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        FieldDescriptorProto,
        FileDescriptorProto,
    )

HERE = Path(__file__).parents[1] / "src" / "tinkex" / "wire"
PROTO = HERE / "proto" / "tinkex.proto"

_MODULE = '''\
"""Message classes of `proto/tinkex.proto`. Written by `python tools/generate_proto.py`."""

import base64

from google.protobuf import descriptor_pool, message_factory

# A pool of our own: nothing else in the process can clash with these names.
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(base64.b64decode("""
{descriptor}
"""))


def _message(name):
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName("{package}." + name))


{messages}

{constants}
'''

_STUB = '''\
"""Message classes of `proto/tinkex.proto`. Written by `python tools/generate_proto.py`."""

from collections.abc import Iterable, MutableMapping, MutableSequence
from typing import Final, TypeVar

from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)

class _Messages(MutableSequence[_M]):
    def add(self) -> _M: ...

class _MessageMap(MutableMapping[str, _M]): ...

{constants}

{messages}
'''

# FieldDescriptorProto.Type to the Python type in the stub.
_SCALARS = {
    1: "float",
    3: "int",
    5: "int",
    8: "bool",
    9: "str",
    12: "bytes",
    13: "int",
    14: "int",
}
_MESSAGE_TYPE = 11
_REPEATED = 3


def compile_proto(proto: Path = PROTO) -> FileDescriptorProto:
    """The compiled file, without what only some compilers add."""
    # grpc_tools ships no types and only this command needs it.
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptor.bin"
        arguments = ["protoc", f"-I{proto.parent}", f"--descriptor_set_out={target}", proto.name]
        if protoc.main(arguments) != 0:  # pyright: ignore[reportUnknownMemberType]
            raise SystemExit(f"protoc could not compile {proto}")
        compiled = FileDescriptorSet.FromString(target.read_bytes()).file[0]
    for message in compiled.message_type:
        _forget_json_names(message)
    return compiled


def render_module(file: FileDescriptorProto) -> str:
    """The text of `tinkex_pb2.py`."""
    encoded = base64.b64encode(file.SerializeToString(deterministic=True)).decode()
    return _MODULE.format(
        descriptor="\n".join(textwrap.wrap(encoded, 96)),
        package=file.package,
        messages="\n".join(f'{m.name} = _message("{m.name}")' for m in file.message_type),
        constants="\n".join(
            f"{value.name} = {value.number}" for enum in file.enum_type for value in enum.value
        ),
    )


def render_stub(file: FileDescriptorProto) -> str:
    """The text of `tinkex_pb2.pyi`."""
    return _STUB.format(
        constants="\n".join(
            f"{value.name}: Final = {value.number}"
            for enum in file.enum_type
            for value in enum.value
        ),
        messages="\n\n".join(_render_class(message) for message in file.message_type),
    )


def _forget_json_names(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _forget_json_names(nested)


def _render_class(message: DescriptorProto) -> str:
    maps = {nested.name: nested for nested in message.nested_type}
    attributes: list[str] = []
    arguments: list[str] = []
    for field in message.field:
        read, write = _python_types(field, maps)
        attributes.append(f"    {field.name}: {read}")
        arguments.append(f"        {field.name}: {write} | None = ...,")
    return "\n".join(
        [
            f"class {message.name}(Message):",
            *attributes,
            "    def __init__(",
            "        self,",
            "        *,",
            *arguments,
            "    ) -> None: ...",
        ]
    )


def _python_types(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> tuple[str, str]:
    """How the attribute reads, and what the constructor takes."""
    if field.type != _MESSAGE_TYPE:
        scalar = _SCALARS[field.type]
        if field.label == _REPEATED:
            return f"MutableSequence[{scalar}]", f"Iterable[{scalar}]"
        return scalar, scalar
    name = field.type_name.rsplit(".", 1)[1]
    if name in maps:
        value, _ = _python_types(maps[name].field[1], {})
        kind = "MutableMapping[str, {}]" if value in _SCALARS.values() else "_MessageMap[{}]"
        return kind.format(value), f"MutableMapping[str, {value}]"
    if field.label == _REPEATED:
        return f"_Messages[{name}]", f"Iterable[{name}]"
    return name, name


def main(folder: Path = HERE) -> None:
    """Write both files into `folder`."""
    compiled = compile_proto()
    (folder / "tinkex_pb2.py").write_text(render_module(compiled))
    (folder / "tinkex_pb2.pyi").write_text(render_stub(compiled))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
