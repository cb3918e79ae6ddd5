"""The parts of the docs that are printed from the program.

    PYTHONPATH=src python -m tests.docs.reference

rewrites them in place; `test_reference.py` fails when a page is behind.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, TypeVar

from tests.docs.blocks import page_named
from tinkex import errors
from tinkex.cli.commands import NOUNS, PROGRAMS, Argument, Command, program, verbs_of
from tinkex.engine.protocol import MAX_RANK
from tinkex.types import bounds
from tinkex.wire.routes import ROUTES, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")


def commands() -> str:
    """Every command with its arguments, as a list."""
    parts: list[str] = []
    for noun, summary in NOUNS.items():
        parts += [f"### `tinkex {noun}`: {summary}", ""]
        for verb, command in verbs_of(noun).items():
            parts += _command(f"tinkex {noun} {verb}", command)
        parts.append("")
    for name, summary in PROGRAMS.items():
        parts += [f"### `tinkex {name}`: {summary}", ""]
        parts += [*_command(f"tinkex {name}", program(name)), ""]
    return "\n".join(parts).rstrip()


def _command(name: str, command: Command) -> list[str]:
    words = [_usage(argument) for argument in command.arguments if not _is_option(argument)]
    lines = [f"- `{' '.join([name, *words])}`: {command.summary}"]
    for argument in command.arguments:
        if _is_option(argument):
            lines.append(f"  - `{_usage(argument)}`: {argument.settings['help']}")
    return lines


def _is_option(argument: Argument) -> bool:
    return argument.names[0].startswith("-")


def _usage(argument: Argument) -> str:
    settings: dict[str, Any] = argument.settings
    metavar = str(settings.get("metavar", ""))
    if _is_option(argument):
        names = ", ".join(argument.names)
        if settings.get("action") is argparse.BooleanOptionalAction:
            names += "".join(f", --no-{name[2:]}" for name in argument.names)
        return f"{names} {metavar}".rstrip()
    return {"?": f"[{metavar}]", "*": f"[{metavar} ...]", "+": f"{metavar} ..."}.get(
        settings.get("nargs", ""), metavar
    )


def error_tree() -> str:
    """The tree drawn at the top of `errors.py`."""
    drawing = [line[4:] for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    return "\n".join(["```text", *drawing, "```"])


def routes() -> str:
    """Every route of the protocol, as a table."""
    rows = [_route(route) for route in ROUTES]
    head = ["| name | method and path | result | retried | |", "|---|---|---|---|---|"]
    return "\n".join(head + rows)


def _route(route: Route[Any, Any]) -> str:
    result = route.future or route.reply
    cells = [
        f"`{route.name}`",
        f"{route.method} `{route.path}`",
        f"`{result.__name__}`" if result else "",
        f"`{route.retry}`",
        "older" if route.legacy else "",
    ]
    return f"| {' | '.join(cells)} |"


def bounds_table() -> str:
    """What a single request may name."""
    rows: list[tuple[str, str, str]] = []
    for (least, most), names in _by_value(bounds.INTEGERS).items():
        rows.append((names, f"{least:,} to {most:,}", "400"))
    least, most = bounds.WHOLE
    rows.append(("every other integer, such as `model_seq_id`", f"{least:,} to {most:,}", "400"))
    rows.append(("`limit` of a listing", f"0 to {bounds.PAGE_ITEMS:,}", "400"))
    rows.append(("`offset` of a listing", f"0 to {bounds.PAGE_OFFSET:,}", "400"))
    for longest, names in _by_value(bounds.TEXTS).items():
        rows.append((names, f"{longest:,} characters each", "400"))
    rows.append(("every other text", f"{bounds.TEXT_CHARACTERS:,} characters", "400"))
    for most_items, names in _by_value(bounds.LISTS).items():
        rows.append((names, f"{most_items:,} items each", "400"))
    rows.append(("every other list or map", f"{bounds.LIST_ITEMS:,} items", "400"))
    rows += [
        ("`user_metadata`", f"{bounds.METADATA_BYTES:,} bytes as JSON", "400"),
        ("free-form members", f"{bounds.JSON_DEPTH} levels deep", "400"),
        ("rank of an adapter", f"{MAX_RANK}", "400"),
        ("a tensor", f"{bounds.TENSOR_DIMENSIONS} dimensions", "the operation fails"),
        ("a tensor, filled", f"{bounds.TENSOR_BYTES:,} bytes", "the operation fails"),
        (
            "`num_samples` times `max_tokens`, or times the rest of the context",
            f"{bounds.SAMPLED_TOKENS:,}",
            "the operation fails",
        ),
        (
            "sampled or prompt tokens times `topk_*` or `prompt_alt_tokens_k`; target tokens",
            f"{bounds.SCORED_CELLS:,}",
            "the operation fails",
        ),
        (
            "lists and objects in JSON",
            f"{bounds.JSON_PARTS:,}; {bounds.TRAINING_JSON_PARTS:,} in a training batch",
            "413",
        ),
        ("values in JSON", f"{bounds.JSON_VALUES:,}", "413"),
        ("the same with a prompt", f"{bounds.SAMPLE_JSON_VALUES:,}", "413"),
        ("the same in a training batch", f"{bounds.TRAINING_JSON_VALUES:,}", "413"),
        ("messages in protobuf", f"{bounds.PROTOBUF_PARTS:,}", "413"),
        ("body of `asample` and of telemetry", f"{bounds.SAMPLE_BYTES:,} bytes", "413; 400"),
        ("training batch in JSON", f"{bounds.TRAINING_JSON_BYTES:,} bytes", "413; 400"),
    ]
    head = ["| what | bound | answer |", "|---|---|---|"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def _by_value(table: Mapping[str, T]) -> dict[T, str]:
    """The names that share a value, as one cell."""
    found: dict[T, list[str]] = {}
    for name, value in table.items():
        found.setdefault(value, []).append(f"`{name}`")
    return {value: ", ".join(names) for value, names in found.items()}


PRINTED: dict[str, tuple[Path, Callable[[], str]]] = {
    "commands": (page_named("cli.md"), commands),
    "error tree": (page_named("errors.md"), error_tree),
    "routes": (page_named("routes.md"), routes),
    "bounds": (page_named("refusals.md"), bounds_table),
}


def printed_part(text: str, name: str) -> str:
    """What stands between the two markers of a printed part."""
    found = _pattern(name).search(text)
    assert found is not None, f"there is no part {name!r}"
    return found[2]


def with_part(text: str, name: str, part: str) -> str:
    """`text` with that part replaced."""
    return _pattern(name).sub(lambda found: f"{found[1]}{part}{found[3]}", text)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: begin -->\n)(.*?)(\n?<!-- {name}: end -->)", re.DOTALL)


if __name__ == "__main__":
    for name, (page, make) in PRINTED.items():
        page.write_text(with_part(page.read_text(), name, make()))
