"""Looking at training data before anything is trained on it."""

from __future__ import annotations

from tinkex.cli.table.base import Argument, Command, Verbs, whole_number

_FILE = Argument("file", metavar="DATA.jsonl", help="one JSON object per line")
_SETTINGS = (
    Argument(
        "--model",
        metavar="NAME",
        help="whose template and tokenizer (default: HuggingFaceTB/SmolLM2-135M-Instruct)",
    ),
    Argument(
        "--kind",
        choices=("sft", "preference"),
        metavar="KIND",
        help="sft or preference (default: what the first line looks like)",
    ),
    Argument(
        "--train-on",
        choices=("all", "last"),
        default="all",
        metavar="WHICH",
        help="all answers of a conversation, or the last (default: all)",
    ),
    Argument(
        "--max-tokens",
        type=whole_number(2),  # an example of one token predicts nothing
        metavar="N",
        help="the most an example may have (default: what the model can take)",
    ),
)

DATA: Verbs = (
    "look at training data",
    {
        "view": Command(
            "data:view",
            "show examples, what is trained in colour or in [[brackets]]",
            _FILE,
            Argument(
                "--limit",
                type=whole_number(0),
                default=5,
                metavar="N",
                help="how many to show; 0 for all (default: 5)",
            ),
            *_SETTINGS,
        ),
        "check": Command(
            "data:check", "find every line that cannot be trained on", _FILE, *_SETTINGS
        ),
    },
)
