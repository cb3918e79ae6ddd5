"""`tinkex data`: training examples as tokens, with the trained ones marked; and bad lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.command_errors import report
from tinkex.cli.commands import Argument, Command, whole_number
from tinkex.cli.connect import service_client
from tinkex.cli.output import print_json, show_one
from tinkex.errors import DataError
from tinkex.tracking.views import CYAN, DIM, painted, shows_colour

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from tinkex.chat.examples import Rendered
    from tinkex.chat.renderer import Renderer
    from tinkex.clients.service import ServiceClient
    from tinkex.data import Example, Kind
    from tinkex.tokenizers import Tokenizer

_NO_LIMIT = 2**62
_BOLD_GREEN = "\033[1;32m"


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file as it would be trained on; each example has one rendering, or one per answer."""

    tokenizer: Tokenizer
    lines: Sequence[int]
    examples: Sequence[dict[str, Rendered]]

    def summary(self) -> dict[str, int]:
        """The totals over all examples."""
        every = [rendered for each in self.examples for rendered in each.values()]
        return {
            "examples": len(self.examples),
            "tokens": sum(len(one.tokens) for one in every),
            "trained_tokens": sum(one.trained for one in every),
            "longest": max(len(one.tokens) for one in every),
        }


def view(args: argparse.Namespace) -> int | None:
    """Show examples, with trained tokens in colour or in [[brackets]]."""
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
    """Report every line that cannot be trained on. Without any, shows the totals."""
    loaded = _load_or_report(args)
    if loaded is None:
        return 1
    summary = loaded.summary()
    names = [(name.replace("_", " ").capitalize(), value) for name, value in summary.items()]
    show_one(args, {"summary": summary, "problems": []}, names)
    return None


def _load_or_report(args: argparse.Namespace) -> RenderedFile | None:
    try:
        return _load(args)
    except DataError as error:
        if args.format == "json":  # all problems; the message has the first ones only
            found = [{"line": one.line, "reason": one.reason} for one in error.problems]
            print_json({"problems": found})
        report(error)
        return None


def _load(args: argparse.Namespace) -> RenderedFile:
    from tinkex.chat.renderer import Renderer
    from tinkex.config import DEFAULT_MODEL
    from tinkex.data import kind_of, read_examples
    from tinkex.tokenizers import tokenizer_for

    path = Path(args.file)
    # Before a server is started, so that a bad file is reported at once.
    kind: Kind = args.kind or kind_of(path)
    examples = read_examples(path, kind)
    model: str = args.model or DEFAULT_MODEL
    with service_client(model) as service:
        name = model.partition("=")[0]
        tokenizer = tokenizer_for(service, name, elsewhere=True)
        most = args.max_tokens or _context_length(service, name)
    renderer = Renderer.of(tokenizer, train_on=args.train_on)
    lines = [example.line for example in examples]
    return RenderedFile(tokenizer, lines, _render(renderer, examples, most, str(path)))


def _render(
    renderer: Renderer, examples: Sequence[Example], most: int, source: str
) -> list[dict[str, Rendered]]:
    from tinkex.chat.examples import PreferenceExample
    from tinkex.data import render_all, render_pairs

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


def _plain(loaded: RenderedFile, count: int) -> list[dict[str, Any]]:
    def plain(one: Rendered) -> dict[str, Any]:
        # The text of each token alone; a part of a character is U+FFFD.
        texts = [loaded.tokenizer.decode([token]) for token in one.tokens]
        return {"tokens": one.tokens, "weights": one.weights, "pieces": texts}

    shown = zip(loaded.lines[:count], loaded.examples[:count], strict=True)
    return [
        {
            "line": line,
            **(plain(each[""]) if "" in each else {k: plain(v) for k, v in each.items()}),
        }
        for line, each in shown
    ]


def _print(loaded: RenderedFile, count: int) -> None:
    colour = shows_colour(sys.stdout)
    for line, each in zip(loaded.lines[:count], loaded.examples[:count], strict=True):
        for name, one in each.items():
            what = f"line {line}, {name}" if name else f"line {line}"
            heading = f"--- {what}: {len(one.tokens)} tokens, {one.trained} trained"
            print(painted(heading, CYAN, colour=colour))
            print(_marked(one, loaded.tokenizer, colour=colour), end="\n\n")
    summary = loaded.summary()
    noun = "example" if summary["examples"] == 1 else "examples"
    print(
        f"{summary['examples']} {noun}, {summary['tokens']} tokens, "
        f"{summary['trained_tokens']} of them trained, the longest has {summary['longest']}"
    )


def _marked(rendered: Rendered, tokenizer: Tokenizer, *, colour: bool) -> str:
    """The text of an example; trained tokens in green, or in brackets without colour."""
    runs = _runs(rendered, tokenizer)
    if not colour:
        return "".join(f"[[{text}]]" if trained else text for text, trained in runs)
    return "".join(
        painted(text, _BOLD_GREEN if trained else DIM, colour=True) for text, trained in runs
    )


def _runs(rendered: Rendered, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    pairs = zip(rendered.tokens, rendered.weights, strict=True)
    for trained, run in groupby(pairs, lambda pair: bool(pair[1])):
        yield _safe(tokenizer.decode([token for token, _ in run])), trained


def _safe(text: str) -> str:
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


_FILE = Argument("file DATA.jsonl", "one JSON object per line")
_SETTINGS = (
    Argument(
        "--model NAME",
        "the model whose template and tokenizer are used "
        "(default: HuggingFaceTB/SmolLM2-135M-Instruct)",
    ),
    Argument(
        "--kind KIND",
        "sft or preference (default: detected from the first line)",
        choices=("sft", "preference"),
    ),
    Argument(
        "--train-on WHICH",
        "all answers of a conversation, or the last",
        choices=("all", "last"),
        default="all",
    ),
    Argument(
        "--max-tokens N",
        "the longest allowed example (default: the model's context length)",
        type=whole_number(2),
    ),
)

VERBS = {
    "view": Command(
        view,
        _FILE,
        Argument("--limit N", "show at most N; 0 shows all", type=whole_number(0), default=5),
        *_SETTINGS,
    ),
    "check": Command(check, _FILE, *_SETTINGS),
}
