"""Every example in the README, the docs and `examples/` runs, and says what it did.

A page's Python blocks are one program, run in a process of its own whose settings name a fake
server on a socket, so that an example can begin with `tinkex.ServiceClient()` as users do.
"""

from __future__ import annotations

import ast
import importlib.metadata
import io
import os
import re
import shlex
import struct
import subprocess
import sys
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, page_named, script_of
from tests.patience import PATIENCE_S
from tinkex.cli.main import main
from tinkex.clients.service import ServiceClient
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# They train a real model, so they run in tests/e2e/test_learning.py, some of them shortened.
REAL = {
    "distill_smollm2.py",
    "dpo_smollm2.py",
    "evaluate_openai.py",
    "rl_smollm2.py",
    "sft_smollm2.py",
}
PUBLIC = {"tinkex", "tinkex.chat", "tinkex.data", "tinkex.testing", "tinkex.types"}
LANGUAGES = {"python", "sh", "text"}
TRAINING_DATA = (
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}, '
    '{"role": "assistant", "content": "Paris"}]}\n'
    '{"prompt": "Q: What is the capital of Italy?\\nA:", "completion": " Rome"}\n'
)

# Blocks that must not run here: how many a page has, so that none is added unseen.
NOT_RUN = {
    "README.md": 2,  # make and pip
    "attach.md": 1,  # a program that was killed: tests/e2e/test_attach.py
    "cli.md": 3,  # the hub; a cluster, and one on Ray
    "cluster.md": 20,  # tests/cluster/test_cluster_page.py and tests/ray run them
    "coming-from-tinker.md": 1,  # a script of the reader's
    "export.md": 3,  # a model of the hub; the rest is in tests/e2e/test_export_import.py
    "gpu.md": 2,  # a GPU, and a server that runs
    "index.md": 1,  # make and pip
    "learning.md": 2,  # minutes of training
    "quickstart.md": 1,  # make
    "recipes.md": 1,  # each has a test of its own
    "serving.md": 2,  # a server that runs; its proxy
    "testing.md": 1,  # a script of the reader's
}

pytestmark = [pytest.mark.req("B22")]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder examples run in; pages find a picture and data to train on there."""
    (tmp_path / "home").mkdir()
    (tmp_path / "train.jsonl").write_text(TRAINING_DATA)
    (tmp_path / "photo.png").write_bytes(_picture())
    return tmp_path


def _picture() -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")


def _settings(work: Path, url: str | None) -> dict[str, str]:
    """The environment of an example: this checkout, an empty home, 80 columns."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "CLOUDFLARE_"))}
    env.update(HOME=str(work / "home"), COLUMNS="80", PYTHONPATH=str(ROOT / "src"))
    env.update(HF_HUB_OFFLINE="1", PYTHONWARNINGS="error")
    if url is not None:
        env.update(TINKER_BASE_URL=url, TINKER_API_KEY=API_KEY)
    return env


def _run(command: list[str], work: Path, url: str | None = None) -> str:
    done = _finished(command, work, url)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _finished(
    command: list[str], work: Path, url: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=work,
        env=_settings(work, url),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def _pytest(file: Path) -> list[str]:
    """Pytest on one file, with our fixtures also where the package is not installed."""
    known = importlib.metadata.entry_points(group="pytest11", name="tinkex")
    plugin = [] if known else ["-p", "tinkex.testing.plugin"]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(file.parent)]
    return [sys.executable, "-m", "pytest", *options, *plugin, str(file)]


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.name not in REAL], ids=lambda path: path.name
)
def test_the_example_runs_and_checks_its_own_result(example: Path, work: Path):
    is_test = example.name.startswith("test_")
    output = _run(_pytest(example) if is_test else [sys.executable, str(example)], work)
    assert ("passed" if is_test else "ok") in output
    assert max(len(line) for line in output.splitlines()) <= 80


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_is_short_and_uses_public_names_only(example: Path):
    text = example.read_text()
    assert len(text.splitlines()) < 150
    tree = ast.walk(ast.parse(text))
    froms = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    assert {name for name in froms if name.partition(".")[0] == "tinkex"} <= PUBLIC
    assert "import tinkex." not in text


def test_an_example_that_did_not_learn_says_so_and_fails(work: Path):
    command = [sys.executable, str(ROOT / "examples" / "sweep.py"), "--steps", "0"]
    done = _finished(command, work)
    assert done.returncode == 1, done.stdout
    assert "NO: rank 2 at 0.0003 is best: loss 5.81 -> 5.81" in done.stdout


@pytest.mark.parametrize(
    ("example", "option"),
    [
        ("pipeline.py", "--steps"),
        ("rollout_processes.py", "--rounds"),
        ("rl_smollm2.py", "--rounds"),
    ],
)
def test_an_example_refuses_to_run_no_steps_at_all(example: str, option: str, work: Path):
    done = _finished([sys.executable, str(ROOT / "examples" / example), option, "0"], work)
    assert done.returncode == 2
    assert f"{option} must be at least 1" in done.stdout


def test_the_recipes_page_lists_exactly_the_examples_there_are():
    listed = re.findall(r"^\| `(\w+\.py)`", page_named("recipes.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [example.name for example in EXAMPLES]


@pytest.mark.parametrize("page", [p for p in PAGES if script_of(p)], ids=lambda path: path.name)
def test_the_pages_python_runs(page: Path, server: FakeServer, work: Path):
    script = work / f"test_{page.stem.replace('-', '_').lower()}.py"
    script.write_text(script_of(page))
    has_tests = "\ndef test_" in script.read_text()
    _run(_pytest(script) if has_tests else [sys.executable, str(script)], work, server.url)


def _shell_blocks(page: Path) -> list[Block]:
    return [b for b in blocks_of(page) if b.language == "sh" and b.not_run is None]


@pytest.mark.parametrize("page", [p for p in PAGES if _shell_blocks(p)], ids=lambda path: path.name)
def test_the_pages_commands_run(
    page: Path,
    server: FakeServer,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, value in _settings(work, server.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(work)
    names = _saved_names()
    for block in _shell_blocks(page):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            assert words[0] == "tinkex", f"{block.name}: only tinkex commands run; say `not run`"
            monkeypatch.setattr(sys, "stdin", io.StringIO(API_KEY + "\n"))
            status = main([_named(word, names) for word in words[1:]])
            assert status == 0, f"{block.name}: {line}\n{capsys.readouterr().err}"


def _saved_names() -> dict[str, str]:
    """A run with checkpoints; RUN and SESSION in the docs stand for its ids."""
    with ServiceClient() as service:
        training = service.create_lora_training_client("tinkex/tiny", rank=8)
        for name in ("step-10", "step-20"):
            training.save_state(name).result()
        training.save_weights_for_sampler("final").result()
        return {"RUN": training.model_id, "SESSION": service.holder.session_id or ""}


def _named(word: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_block_says_what_it_is(page: Path):
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


def test_only_listed_blocks_are_not_run():
    skipped = [block for page in PAGES for block in blocks_of(page) if block.not_run]
    assert Counter(block.page.name for block in skipped) == NOT_RUN
