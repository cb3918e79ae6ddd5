"""Talking to models, the demonstration, and the doctor."""

from __future__ import annotations

import argparse

from tinkex.cli.table.base import Argument, Command, real_number, whole_number

_WHOLE = whole_number(1)

_TEMPERATURE = Argument(
    "--temperature",
    type=real_number(lambda number: number >= 0, "of 0 or more"),
    default=0.7,
    metavar="T",
    help="0 takes the likeliest token (default: 0.7)",
)
_TOP_P = Argument(
    "--top-p",
    type=real_number(lambda number: 0 < number <= 1, "above 0 and at most 1"),
    default=1.0,
    metavar="P",
    help="draw from the likeliest tokens that have this share (default: 1)",
)

CHAT = Command(
    "chat:chat",
    "talk to a model or a checkpoint",
    Argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a base model, a tinker:// path, or the folder of a training run "
        "(default: the server's only model)",
    ),
    Argument("--system", metavar="TEXT", help="a system message to begin with"),
    _TEMPERATURE,
    _TOP_P,
    Argument(
        "--max-tokens",
        type=_WHOLE,
        default=512,
        metavar="N",
        help="of one answer (default: 512)",
    ),
    Argument("--seed", type=int, metavar="N", help="the same answers every time"),
)

SAMPLE = Command(
    "sample:sample",
    "answer prompts, from a file or from the command line",
    Argument(
        "prompts",
        nargs="?",
        metavar="PROMPTS",
        help=".jsonl: in each line a string, or an object with prompt or messages; "
        "any other file: each line is a prompt",
    ),
    Argument(
        "--prompt",
        dest="given",
        action="append",
        metavar="TEXT",
        help="a prompt, instead of a file; may be given again",
    ),
    Argument(
        "-o",
        "--output",
        metavar="OUT",
        help="write JSON lines, one for each prompt (default: print the answers)",
    ),
    Argument("--model", metavar="NAME", help="a base model (default: the server's only one)"),
    Argument("--path", metavar="PATH", help="a tinker:// path, or the folder of a training run"),
    Argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="text is a user's message, not the beginning of a text (default: as the run of "
        "--path was trained, else --no-chat)",
    ),
    Argument(
        "--max-tokens", type=_WHOLE, default=256, metavar="N", help="of a sample (default: 256)"
    ),
    _TEMPERATURE,
    _TOP_P,
    Argument(
        "--num-samples", type=_WHOLE, default=1, metavar="N", help="of each prompt (default: 1)"
    ),
    Argument("--seed", type=int, metavar="N", help="the same samples every time"),
    Argument(
        "--concurrency",
        type=_WHOLE,
        default=32,
        metavar="N",
        help="prompts under way at once (default: 32)",
    ),
    Argument("--overwrite", action="store_true", help="begin again where OUT is there"),
)

DOCTOR = Command("doctor:doctor", "check the installation, the settings and the server")

DEMO = Command(
    "demo:demo",
    "fine-tune a small model here, and see what it learns",
    Argument(
        "-o",
        "--output",
        metavar="DIR",
        default="runs/demo",
        help="the folder of the run (default: runs/demo)",
    ),
    Argument("--steps", type=_WHOLE, default=32, metavar="N", help="of training (default: 32)"),
)
