"""`import tinker` gives tinkex, in this process, its children and under the command."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tinkex import dropin
from tinkex.dropin import names
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def installed() -> Iterator[None]:
    dropin.install()
    yield
    dropin.uninstall()


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinkex.dropin", *arguments]
    # The command runs in another folder, where a relative PYTHONPATH would not be found.
    environment = {**os.environ, "PYTHONPATH": str(Path(dropin.__file__).parents[2])}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=PATIENCE_S
    )


@pytest.mark.usefixtures("installed")
def test_there_are_59_public_names_and_each_resolves() -> None:
    tinker = importlib.import_module("tinker")
    assert len(tinker.__all__) == len(set(tinker.__all__)) == 59
    missing = [name for name in tinker.__all__ if not hasattr(tinker, name)]
    assert missing == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", sorted(names.MODULES))
def test_module_imports(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__name__ == name
    assert all(isinstance(known, str) for known in dir(module))


@pytest.mark.usefixtures("installed")
def test_objects_are_those_of_tinkex() -> None:
    tinker = importlib.import_module("tinker")
    tinkex = importlib.import_module("tinkex")
    assert tinker.Datum is tinkex.types.Datum
    assert tinker.types.tensor_data.TensorData is tinkex.types.TensorData
    assert tinker.RateLimitError is tinkex.errors.RateLimitError
    interfaces = importlib.import_module("tinker.lib.public_interfaces")
    assert interfaces.sampling_client.SamplingClient is tinkex.SamplingClient
    assert interfaces.AwaitableConcurrentFuture is tinkex.APIFuture


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("tinker.lib.public_interfaces.sampling_client", "RetryConfig"),
        ("tinker.lib.public_interfaces.training_client", "CustomLossFnV1"),
        ("tinker.lib.retry_handler", "RetryConfig"),
        ("tinker.lib.retry_handler", "is_retryable_status_code"),
        ("tinker.lib.api_future_impl", "QueueState"),
        ("tinker.lib.api_future_impl", "QueueStateObserver"),
        ("tinker.lib.experimental", "ExperimentalWarning"),
        ("tinker.types.topk_logprobs", "TopkLogprobs"),
        ("tinker.types.topk_logprobs", "MASK_LOGPROB"),
        ("tinker.types.optimizer", "OptimParamsBase"),
        ("tinker.types.optimizer", "OptimizerConfigBase"),
        ("tinker.types.custom_loss_graph", "CustomLossNodeOp"),
        ("tinker.types.try_again_response", "TryAgainResponse"),
        ("tinker.types.generic_event", "GenericEvent"),
        ("tinker.types.shared", "UntypedAPIFuture"),
        ("tinker.auth", "get_tinker_token"),
        ("tinker.auth", "tinker_has_credentials"),
        ("tinker.auth", "raise_if_tinker_not_accessible"),
        ("tinker._exceptions", "APIStatusError"),
    ],
)
def test_name_that_lives_only_in_a_submodule_resolves(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.usefixtures("installed")
def test_version_is_that_of_the_protocol_we_speak() -> None:
    tinker = importlib.import_module("tinker")
    assert importlib.metadata.version("tinker") == tinker.__version__ == "0.36.0"
    assert tinker.__title__ == "tinker"
    assert importlib.metadata.version("msgspec")


@pytest.mark.usefixtures("installed")
def test_unknown_names_and_modules_are_refused() -> None:
    tinker = importlib.import_module("tinker")
    with pytest.raises(AttributeError, match="no attribute 'Dautm'"):
        _ = tinker.Dautm
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tinker.types.nothing")
    with pytest.raises(ModuleNotFoundError, match="use ServiceClient"):
        importlib.import_module("tinker.resources")


@pytest.mark.usefixtures("installed")
def test_a_patched_name_is_seen_by_later_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    tinker = importlib.import_module("tinker")
    monkeypatch.setattr("tinker.ServiceClient", "patched")
    assert tinker.ServiceClient == "patched"


def test_nothing_is_left_after_uninstall() -> None:
    before = (list(sys.meta_path), list(sys.path))
    dropin.install()
    dropin.install()
    importlib.import_module("tinker.types")
    dropin.uninstall()
    assert (list(sys.meta_path), list(sys.path)) == before
    assert not [name for name in sys.modules if name.split(".")[0] == "tinker"]
    assert not dropin.installed()


def test_installing_over_the_official_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    official = types.ModuleType("tinker")
    official.__file__ = "/somewhere/tinker/__init__.py"
    monkeypatch.setitem(sys.modules, "tinker", official)
    with pytest.raises(TinkerError, match=r"already imported \(tinker from /somewhere/tinker"):
        dropin.install()
    assert not dropin.installed()


SCRIPT = """
import multiprocessing, sys, tinker, neighbour
from tinker import types

def child(queue):
    import importlib.metadata
    queue.put([tinker.Datum.__module__, importlib.metadata.version("tinker")])

if __name__ == "__main__":
    assert sys.argv == [__file__, "--flag", "-x"], sys.argv
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=240), types.Datum.__module__, neighbour.NAME)
    process.join()
"""


def test_script_and_its_spawned_children_run_on_tinkex(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(str(script), "--flag", "-x")
    assert done.returncode == 0, done.stderr
    module = importlib.import_module("tinkex.types").Datum.__module__
    assert done.stdout == f"['{module}', '0.36.0'] {module} next door\n"


def test_module_runs_with_its_arguments_and_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, tinker\nprint(tinker.__version__, __name__, sys.argv[1:])\nsys.exit(3)\n"
    )
    done = run("-m", "program", "a", "-m", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "0.36.0 __main__ ['a', '-m']\n")


def test_command_line_of_the_official_package_is_ours() -> None:
    done = run("-m", "tinker.cli", "version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_code_runs_with_its_arguments() -> None:
    done = run("-c", "import sys, tinker; print(tinker.__title__, sys.argv)", "x")
    assert (done.returncode, done.stdout) == (0, "tinker ['-c', 'x']\n")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "usage: python -m tinkex.dropin"),
        ([], 2, "usage: python -m tinkex.dropin"),
        (["-m"], 2, "usage: python -m tinkex.dropin"),
        (["--wrong"], 2, "unknown option --wrong"),
        (["no-such-script.py"], 2, "no such file: no-such-script.py"),
    ],
)
def test_command_says_how_it_is_used(arguments: list[str], code: int, text: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert text in (done.stdout if code == 0 else done.stderr)
