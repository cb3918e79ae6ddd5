"""The nginx configuration of the page about clusters, before real nodes: a run notices nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.nodes import cluster, until
from tests.contracts.conftest import postgres
from tests.docs.blocks import DOCS, blocks_of
from tests.e2e.serving import MODEL, environment, read_line
from tests.patience import PATIENCE_S
from tests.unit.serving.authority import Authority

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.cluster.nodes import Cluster
    from tests.contracts.postgres import PostgresServer

__all__ = ["postgres"]

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
STEPS = 8
PROGRAM = f"""
import sys, tinkex
from tests.e2e.workers import datum
with tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x") as service:
    training = service.create_lora_training_client({MODEL!r}, rank=4, seed=1)
    print(training.model_id, flush=True)
    for _ in range({STEPS}):
        future = training.forward_backward([datum()], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result({PATIENCE_S})
        print(future.result({PATIENCE_S}).metrics["loss:sum"], flush=True)
        if sys.argv[2] == "wait":
            sys.stdin.readline()
"""


@contextmanager
def balanced(folder: Path, nodes: Cluster, authority: Authority) -> Generator[str]:
    """The page's configuration with addresses of this machine; its URL."""
    (text,) = [
        block.text
        for block in blocks_of(DOCS / "how-to" / "cluster.md")
        if "upstream tinkex" in block.text
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    certificate, key = authority.issue("one")
    words = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "tinker.example.com": "127.0.0.1",
        "/etc/ssl/tinker.pem": str(certificate),
        "/etc/ssl/tinker.key": str(key),
    }
    for address, name in (("10.0.0.13", "front"), ("10.0.0.11", "a"), ("10.0.0.12", "b")):
        words[f"{address}:8000"] = nodes.nodes[name].url.removeprefix("http://")
    for old, new in words.items():
        assert old in text
        text = text.replace(old, new)
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{paths}{text}\n}}\n"
    )
    assert NGINX is not None
    popen = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(config)])
    try:
        until(lambda: _answers(f"https://127.0.0.1:{port}", authority), "nginx does not answer")
        yield f"https://127.0.0.1:{port}"
    finally:
        popen.terminate()
        popen.wait(PATIENCE_S)


def _answers(url: str, authority: Authority) -> bool:
    try:
        return _get(f"{url}/healthz", authority) == 200
    except OSError:
        return False


def _get(url: str, authority: Authority, body: dict[str, object] | None = None) -> int:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer tml-x"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as reply:
            text = reply.read().decode()
            assert body is None or text.endswith("data: [DONE]\n\n"), text
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def program(url: str, home: Path, authority: Authority, how: str) -> Generator[subprocess.Popen]:
    env = environment(home, SSL_CERT_FILE=str(authority.certificate))
    command = [sys.executable, "-c", PROGRAM, url, how]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        try:
            yield popen
        finally:
            popen.kill()


def test_a_run_behind_nginx_outlives_the_node_that_owned_it(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "nginx").mkdir()
    with (
        cluster(tmp_path / "nodes", postgres.new_place(), "a", "b", gateway="front") as nodes,
        balanced(tmp_path / "nginx", nodes, authority) as url,
    ):
        with program(url, tmp_path, authority, "go on") as undisturbed:
            expected = undisturbed.communicate(timeout=PATIENCE_S)[0].splitlines()[1:]
        assert len(expected) == STEPS
        prompt: dict[str, object] = {"model": MODEL, "prompt": "a", "max_tokens": 3}
        assert _get(f"{url}/v1/completions", authority, {**prompt, "stream": True}) == 200
        assert _get(f"{url}/metrics", authority) == 404
        with program(url, tmp_path, authority, "wait") as disturbed:
            assert disturbed.stdin is not None
            owner = nodes.owner_of(read_line(disturbed, PATIENCE_S).strip())
            told = []
            for number in range(STEPS):
                told.append(read_line(disturbed, PATIENCE_S).strip())
                if number == STEPS // 2:
                    nodes.kill(owner)
                disturbed.stdin.write("\n")
                disturbed.stdin.flush()
            assert told == expected
