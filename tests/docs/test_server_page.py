"""What the pages for operators of a server say about the code is true of the code."""

from __future__ import annotations

import ast
import inspect
import re

import torch

from tests.docs.blocks import ROOT, page_named
from tinkex.adapters import folder, tensor_header
from tinkex.clients import local_loss
from tinkex.engine.backends.torch import TORCH
from tinkex.engine.backends.torch.adamw import fresh_moments
from tinkex.engine.training import custom_loss, loss_evaluation, losses
from tinkex.engine.training.optim import adamw_step
from tinkex.server import Settings
from tinkex.server.api import imports
from tinkex.server.api.usage import MOST_AUDITED
from tinkex.server.app import HANDLERS
from tinkex.server.observability import requests
from tinkex.server.openapi import describe
from tinkex.types import AdamParams

PAGE = "\n".join(page_named(name).read_text() for name in ("operating.md", "refusals.md"))


def not_implemented() -> set[str]:
    """The handlers that refuse with 501 somewhere."""
    found: set[str] = set()
    for file in (ROOT / "src" / "tinkex" / "server").rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if (
                    isinstance(call, ast.Call)
                    and call.args
                    and isinstance(call.args[0], ast.Constant)
                    and call.args[0].value == 501
                ):
                    found.add(function.name)
    return found


def section(title: str) -> str:
    _, _, rest = PAGE.partition(f"# {title}\n")
    assert rest, title
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def test_the_routes_that_answer_501_are_those_in_the_code() -> None:
    listed = set(re.findall(r"^\| `(\w+)`", section("Routes that answer 501"), re.MULTILINE))
    assert listed == not_implemented()
    assert listed <= set(HANDLERS)


def test_the_limits_and_times_are_those_in_the_code() -> None:
    refused, kept = section("Bodies and values"), section("How long things are kept")
    numbers = [
        custom_loss.MAX_NODES,
        custom_loss.MAX_ELEMENTS,
        custom_loss.MAX_TOTAL,
        custom_loss.MAX_VALUES,
        custom_loss.MAX_WORK,
        folder.MAX_CONFIG_BYTES,
        tensor_header.MAX_HEAD_BYTES,
        imports.BLOCK_BYTES,
    ]
    for number in numbers:
        assert f" {number:,} " in refused
    assert f"latest {requests._KEPT_POLLS:,} " in PAGE
    settings = Settings()
    assert (settings.result_ttl_s, settings.session_timeout_s) == (6 * 3600, 5 * 60)
    assert (settings.url_ttl_s, settings.token_ttl_s) == (3600, 3600)
    assert settings.history_s == 30 * 24 * 3600
    assert f"newest {MOST_AUDITED:,} " in kept
    for name in re.findall(r"`(\w+_(?:s|bytes))`", refused + kept):
        assert hasattr(settings, name), name


def test_every_metric_of_a_training_step_is_listed() -> None:
    page = page_named("metrics.md").read_text().partition("## What a training step reports")[2]
    listed = set(re.findall(r"^\| `([\w:]+)`", page, re.MULTILINE))
    flat = torch.ones(2)
    _, _, step = adamw_step(flat, flat, fresh_moments(flat), AdamParams(), TORCH)
    assert listed == step.keys() | folded_names()


def folded_names() -> set[str]:
    """The names in the code that say how parts of a batch are joined."""
    text = "".join(inspect.getsource(module) for module in (losses, loss_evaluation, local_loss))
    return set(re.findall(r'"(\w+:(?:sum|mean|min|max))"', text))


def test_every_path_without_a_key_is_there() -> None:
    paths = re.findall(r"`(/[\w./]+)`", section("Pages without a key").partition("\n\n`")[0])
    assert set(paths) == {"/healthz", "/api/v1/healthz", "/readyz", "/openapi.json"}
    open_paths = [
        path
        for path, methods in describe()["paths"].items()
        if any(operation.get("security") == [] for operation in methods.values())
    ]
    assert open_paths == ["/api/v1/healthz"]
