"""`tinkex data`: what a model would be trained on, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.chat.renderer import Renderer
from tinkex.cli.connect import service_client
from tinkex.cli.failures import report
from tinkex.cli.output import print_json, show_one
from tinkex.cli.trained_text import Page, pieces
from tinkex.config import DEFAULT_MODEL
from tinkex.data.jsonl import kind_of, read_examples
from tinkex.data.rendering import render_all, render_pairs
from tinkex.errors import DataError
from tinkex.tokenizers import tokenizer_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient
    from tinkex.data.example_objects import Example, Kind
    from tinkex.tokenizers import Tokenizer

_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file as it would be trained on; each example has one rendering, or one per answer."""

    tokenizer: Tokenizer
    lines: Sequence[int]
    examples: Sequence[dict[str, Rendered]]

    def summary(self) -> dict[str, int]:
        """How much there is, over all examples."""
        every = [rendered for each in self.examples for rendered in each.values()]
        return {
            "examples": len(self.examples),
            "tokens": sum(len(one.tokens) for one in every),
            "trained_tokens": sum(one.trained for one in every),
            "longest": max(len(one.tokens) for one in every),
        }


def view(args: argparse.Namespace) -> int | None:
    """Show the first examples, and how much there is."""
    loaded = _load_or_report(args)
    if loaded is None:
        return 1
    count = args.limit or len(loaded.examples)
    if args.format == "json":
        print_json({"examples": _plain(loaded, count), "summary": loaded.summary()})
        return None
    _print(loaded, count)
    return None


def check(args: argparse.Namespace) -> int | None:
    """Say how much there is, or every line that cannot be used."""
    loaded = _load_or_report(args)
    if loaded is None:
        return 1
    summary = loaded.summary()
    names = [(name.replace("_", " ").capitalize(), value) for name, value in summary.items()]
    show_one(args, {"summary": summary, "problems": []}, names)
    return None


def _load_or_report(args: argparse.Namespace) -> Loaded | None:
    try:
        return _load(args)
    except DataError as error:
        if args.format == "json":  # all of them: the message shows the first
            found = [{"line": one.line, "reason": one.reason} for one in error.problems]
            print_json({"problems": found})
        report(error)
        return None


def _load(args: argparse.Namespace) -> Loaded:
    path = Path(args.file)
    # Before anything is started: a bad file is known at once.
    kind: Kind = args.kind or kind_of(path)
    examples = read_examples(path, kind)
    model: str = args.model or DEFAULT_MODEL
    with service_client(model) as service:
        name = model.partition("=")[0]
        tokenizer = tokenizer_for(service, name, elsewhere=True)
        most = args.max_tokens or _context_length(service, name)
    renderer = Renderer.of(tokenizer, train_on=args.train_on)
    lines = [example.line for example in examples]
    return Loaded(tokenizer, lines, _render(renderer, examples, most, str(path)))


def _render(
    renderer: Renderer, examples: Sequence[Example], most: int, source: str
) -> list[dict[str, Rendered]]:
    from tinkex.chat.examples import PreferenceExample

    pairs = [example for example in examples if isinstance(example, PreferenceExample)]
    if pairs:
        found = render_pairs(renderer, pairs, max_tokens=most, source=source)
        return [{"chosen": chosen, "rejected": rejected} for chosen, rejected in found]
    singles = [each for each in examples if not isinstance(each, PreferenceExample)]
    rendered = render_all(renderer, singles, max_tokens=most, source=source)
    return [{"": one} for one in rendered]


def _context_length(service: ServiceClient, model: str) -> int:
    offered = service.get_server_capabilities().supported_models
    lengths = [each.max_context_length for each in offered if each.model_name == model]
    return (lengths[0] if lengths else None) or _NO_LIMIT


def _plain(loaded: Loaded, count: int) -> list[dict[str, Any]]:
    def plain(one: Rendered) -> dict[str, Any]:
        texts = pieces(one, loaded.tokenizer)
        return {"tokens": one.tokens, "weights": one.weights, "pieces": texts}

    shown = zip(loaded.lines[:count], loaded.examples[:count], strict=True)
    return [
        {
            "line": line,
            **(plain(each[""]) if "" in each else {k: plain(v) for k, v in each.items()}),
        }
        for line, each in shown
    ]


def _print(loaded: Loaded, count: int) -> None:
    page = Page()
    for line, each in zip(loaded.lines[:count], loaded.examples[:count], strict=True):
        for name, one in each.items():
            what = f"line {line}, {name}" if name else f"line {line}"
            page.heading(f"{what}: {len(one.tokens)} tokens, {one.trained} trained")
            page.example(one, loaded.tokenizer)
            page.line()
    summary = loaded.summary()
    noun = "example" if summary["examples"] == 1 else "examples"
    page.line(
        f"{summary['examples']} {noun}, {summary['tokens']} tokens, "
        f"{summary['trained_tokens']} of them trained, the longest has {summary['longest']}"
    )
