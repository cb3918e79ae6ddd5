"""The command table: frozen, complete, cheap to ask for help, honest about its exit status."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tinkex._version import __version__
from tinkex.cli.commands import DONE, INTERRUPTED, MISUSED, NOUNS, PROGRAMS, program, verbs_of
from tinkex.cli.main import build_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Ran

FLAGS = Path(__file__).with_name("flags.txt")
SOURCE = str(Path(__file__).parents[3] / "src")


def leaves(
    name: str = "tinkex", parser: argparse.ArgumentParser | None = None
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command below one, and itself, with its parser."""
    parser = parser or build_parser()
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from leaves(f"{name} {word}", below)


def described(name: str, parser: argparse.ArgumentParser) -> str:
    words = [
        "|".join(sorted(action.option_strings)) or f"<{action.metavar}>"
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction)
    ]
    return " ".join([name, *sorted(words)])


def test_commands_and_flags_are_those_we_froze():
    now = "\n".join(described(name, parser) for name, parser in leaves()) + "\n"
    assert now == FLAGS.read_text(), "an intended change? then update flags.txt"


def test_every_command_has_a_handler_and_a_summary():
    commands = [command for noun in NOUNS for command in verbs_of(noun).values()]
    for command in (*commands, *map(program, PROGRAMS)):
        assert callable(command.handler)
        assert command.summary


def test_every_page_of_help_fits_eighty_columns():
    for name, parser in leaves():
        for line in parser.format_help().splitlines():
            assert len(line) <= 80, f"{name}: {line}"


def test_help_goes_to_standard_output_and_is_a_success(run: Callable[..., Ran]):
    for words in (("--help",), ("checkpoint", "-h"), ("checkpoint", "delete", "--help")):
        ran = run(*words)
        assert (ran.status, ran.err) == (DONE, "")
        assert ran.out.startswith("usage: tinkex")


@pytest.mark.parametrize("words", [(), ("checkpoint",), ("-f", "json")])
def test_half_a_command_shows_help_and_is_a_misuse(run: Callable[..., Ran], words: tuple[str, ...]):
    ran = run(*words)
    assert (ran.status, ran.out) == (MISUSED, "")
    assert "usage: tinkex" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("run", "nonsense"),
        ("run", "list", "--nonsense"),
        ("run", "list", "--limit", "many"),
        ("run", "list", "--format", "yaml"),
        ("run", "info"),
        ("run", "list", "--lim", "3"),
    ],
)
def test_a_misspelt_command_is_a_misuse(run: Callable[..., Ran], words: tuple[str, ...]):
    ran = run(*words)
    assert ran.status == MISUSED
    assert "error:" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "tinkex: error: there is no command 'trian'. Did you mean `train`?"),
        ("run lst", "tinkex run: error: there is no command 'lst'. Did you mean `list`?"),
        ("sft a.jsonl", "tinkex: error: there is no command 'sft'. Did you mean `train sft`?"),
        ("train sft --rnak 3", "there is no option --rnak. Did you mean `--rank`?"),
        ("run list --lim=3", "there is no option --lim. Did you mean `--limit`?"),
        ("run list -f jsn", "'jsn' is none of table, json. Did you mean `json`?"),
        ("train sft x --train-on lats", "is none of all, last. Did you mean `last`?"),
        ("checkpoint download --ouput y", "there is no option --ouput. Did you mean `--output`?"),
    ],
)
def test_a_misspelt_word_gets_the_one_that_may_be_meant(
    run: Callable[..., Ran], words: str, said: str
):
    ran = run(*words.split())
    assert ran.status == MISUSED
    assert said in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("frobnicate", "there is no command 'frobnicate'. `tinkex --help` lists the commands."),
        ("run frobnicate", "`tinkex run --help` lists the commands."),
        ("run list --frobnicate", "error: there is no option --frobnicate"),
        ("run list -z", "tinkex run list: error: there is no option -z"),
        ("run info a b c", "tinkex run info: error: unexpected arguments: b c"),
        ("run list --limit many", "--limit: must be a whole number, 0 or more, not 'many'"),
    ],
)
def test_a_word_that_resembles_nothing_gets_no_guess(
    run: Callable[..., Ran], words: str, said: str
):
    ran = run(*words.split())
    assert ran.status == MISUSED
    assert ran.err.splitlines()[-1].endswith(said)


def test_the_version_is_printed(run: Callable[..., Ran]):
    for words in (("version",), ("--version",)):
        ran = run(*words)
        assert (ran.status, ran.out, ran.err) == (DONE, f"tinkex {__version__}\n", "")
    assert run("version", "-f", "json").json == {"version": __version__}


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "words",
    [
        ("-f", "json", "model", "list"),
        ("model", "-f", "json", "list"),
        ("model", "list", "--format", "json"),
        ("--format", "table", "model", "list", "--format", "json"),
    ],
)
def test_the_format_may_stand_before_or_after_the_command(
    run: Callable[..., Ran], words: tuple[str, ...]
):
    assert run(*words).json["models"]


# -- cost -----------------------------------------------------------------------------------------


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": SOURCE}


FOREIGN = {"anyio", "msgspec", "numpy", "rich", "torch", "transformers", "google.protobuf"}
HELP = "from tinkex.cli.main import main; raise SystemExit(main(['--help']))"


@pytest.mark.req("S36")
def test_help_imports_nothing_but_argparse():
    code = f"import sys\ntry:\n {HELP}\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        python("-c", code), env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    ours = {name for name in loaded if name.split(".")[0] == "tinkex"}
    modules = {f"tinkex.cli.{name}" for name in ("commands", "main", "parser")}
    outside = {"tinkex", "tinkex._version", "tinkex.lazy_imports", "tinkex.cli"}
    assert ours == outside | modules
    heavy = {
        "asyncio",
        "dataclasses",
        "difflib",
        "inspect",
        "json",
        "logging",
        "shutil",
        "socket",
        "ssl",
    }
    assert not loaded & (heavy | FOREIGN)


@pytest.mark.req("S36")
@pytest.mark.parametrize("name", [*NOUNS, *PROGRAMS])
def test_help_of_a_command_imports_no_client(name: str):
    code = (
        "import sys\nfrom tinkex.cli.main import main\n"
        f"main([{name!r}, '--help'])\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        python("-c", code), env=environment(), capture_output=True, text=True, check=True
    )
    assert not set(done.stderr.split()) & (FOREIGN | {"asyncio", "ssl", "tinkex.clients"})


@pytest.mark.req("B20")
def test_help_costs_at_most_three_times_an_empty_program():
    def cpu_s(code: str) -> float:
        spent: list[float] = []
        for _ in range(7):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                python("-c", code), env=environment(), stdout=subprocess.DEVNULL, check=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(spent)  # the least disturbed run: this machine may be busy with others

    assert cpu_s(HELP) <= 3 * cpu_s("pass")


# -- exit status of the real program --------------------------------------------------------------


def test_the_program_runs_as_a_module():
    done = subprocess.run(
        python("-m", "tinkex.cli", "version"), env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (DONE, f"tinkex {__version__}\n")


@pytest.mark.req("B20")
def test_interrupting_a_command_exits_with_130(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings = {
            **environment(),
            "HOME": str(tmp_path),
            "TINKER_BASE_URL": f"http://127.0.0.1:{mute.getsockname()[1]}",
            "TINKER_API_KEY": "tml-test",
        }
        command = subprocess.Popen(
            python("-m", "tinkex.cli", "run", "list"),
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = mute.accept()  # it is waiting for an answer now
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=PATIENCE_S)
        connection.close()
    assert command.returncode == INTERRUPTED
    assert (out, err.splitlines()[-1]) == ("", "Interrupted.")
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_accident(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    code = (
        "import sys, types\n"
        "from tinkex.cli.commands import Command\n"
        "from tinkex.cli.main import main\n"
        "sys.modules['tinkex.cli.run'] = module = types.ModuleType('run')\n"
        "module.VERBS = {'list': Command(lambda args: print('x' * 100_000))}\n"
        "raise SystemExit(main(['run', 'list']))\n"
    )
    done = subprocess.run(
        python("-c", code), env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
