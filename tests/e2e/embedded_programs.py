"""Programs that use the embedded server; tests run them and end them in every way.

What a test has to know comes as one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.e2e.serving import MODEL, children
from tests.e2e.workers import datum, sample
from tests.patience import PATIENCE_S
from tinkex import ServiceClient

if TYPE_CHECKING:
    from collections.abc import Callable


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def url_of(service: ServiceClient) -> str:
    return service.holder.config.base_url


def end(how: str) -> None:
    """Start a server, say which processes there are, and end."""
    service = ServiceClient()
    sampler = service.create_sampling_client(base_model=MODEL)
    sample(sampler)
    say(processes=children(os.getpid()), folder=os.environ["TINKEX_EMBEDDED_SERVER"])
    endings: dict[str, Callable[[], Any]] = {
        "returns": lambda: None,
        "closes": lambda: service.close().result(PATIENCE_S),
        "raises": lambda: 1 / 0,
        "sys.exit": lambda: sys.exit(3),
        "os._exit": lambda: os._exit(4),
        "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }
    endings[how]()


def end_with_a_fork_alive() -> None:
    """Be killed while a forked child, which ends with its input, lives on."""
    service = ServiceClient()
    sample(service.create_sampling_client(base_model=MODEL))
    processes = children(os.getpid())
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    say(processes=processes)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_input() -> None:
    """Start a server, say which processes there are, and wait for a line or for Ctrl-C."""
    service = ServiceClient()
    sample(service.create_sampling_client(base_model=MODEL))
    say(processes=children(os.getpid()))
    sys.stdin.readline()


def stop_early() -> None:
    """End the server before the program; the next client starts another."""
    import tinkex.embedded

    with ServiceClient() as service:
        sample(service.create_sampling_client(base_model=MODEL))
        first, folder = url_of(service), os.environ["TINKEX_EMBEDDED_SERVER"]
    tinkex.embedded.stop()
    left, kept = children(os.getpid()), os.path.exists(folder)
    with ServiceClient() as service:
        sample(service.create_sampling_client(base_model=MODEL))
        say(left=left, kept=kept, another=url_of(service) != first)


def share() -> None:
    """Two clients, one of them by name and with somebody else's key around."""
    with ServiceClient() as one:
        first = sample(one.create_sampling_client(base_model=MODEL))
        os.environ["TINKER_API_KEY"] = "tml-for-somewhere-else"
        with ServiceClient("embedded") as two, ServiceClient(base_url="embedded") as three:
            second = sample(two.create_sampling_client(base_model=MODEL))
            sample(three.create_sampling_client(base_model=MODEL))
            urls = [url_of(service) for service in (one, two, three)]
    say(urls=urls, same=first == second)


def sample_from_a_new_client() -> tuple[str, list[list[int]]]:
    with ServiceClient() as service:
        tokens = sample(service.create_sampling_client(base_model=MODEL))
        return url_of(service), tokens


def other_processes() -> None:
    """A forked, a spawned and a separate process, with a pickle and with clients of their own."""
    service = ServiceClient()
    sampler = service.create_sampling_client(base_model=MODEL)
    expected = sample(sampler)
    answers: dict[str, Any] = {}
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(sample_from_a_new_client()).encode())
        os._exit(0)
    answers["forked"] = json.loads(os.read(read, 1 << 16))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        answers["pickled"] = [url_of(service), pool.submit(sample, sampler).result(PATIENCE_S)]
        answers["spawned"] = pool.submit(sample_from_a_new_client).result(PATIENCE_S)
    program = [sys.executable, "-m", "tests.e2e.embedded_programs", "say_sample"]
    answers["separate"] = json.loads(subprocess.check_output(program, timeout=PATIENCE_S))["answer"]
    key = service.holder.config.api_key
    assert key is not None
    say(
        answers=answers,
        expected=[url_of(service), expected],
        leaks=[name for name, value in os.environ.items() if key in value],
        mode=oct(os.stat(f"{os.environ['TINKEX_EMBEDDED_SERVER']}/server.json").st_mode & 0o777),
    )


def say_sample() -> None:
    say(answer=sample_from_a_new_client())


def outlive_the_server() -> None:
    """Kill the server in the middle; training goes on with the next one at the same place."""
    with ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        before = training.forward([datum()], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
        url = url_of(service)
        (server, *_) = children(os.getpid())
        os.kill(server, signal.SIGKILL)
        after = training.forward([datum()], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
        now = children(os.getpid())
        say(same=before == after, url=url == url_of(service), replaced=server not in now)


def save(name: str) -> None:
    with ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        training.forward_backward([datum()], "cross_entropy").result(PATIENCE_S)
        say(path=training.save_state(name).result(PATIENCE_S).path)


def load(path: str) -> None:
    with ServiceClient() as service:
        training = service.create_training_client_from_state(path)
        say(metrics=bool(training.forward([datum()], "cross_entropy").result(PATIENCE_S).metrics))


def fail() -> None:
    try:
        with ServiceClient() as service:
            service.get_server_capabilities()
    except Exception as error:  # noqa: BLE001
        say(kind=type(error).__name__, message=str(error))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
