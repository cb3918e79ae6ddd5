"""The files in deploy/: they have the fields that systemd and KubeRay know, and real commands."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_S
from tinkex.cli.main import build_parser
from tinkex.ray_cluster.nodes import parse_gpu_nodes

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "tinkex-node@.service"
# Fields of the custom resource `ray.io/v1` that the file may use.
CLUSTER = {"rayVersion", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"serviceType", "rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    text = (DEPLOY / "kuberay" / "raycluster.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_ray_cluster_has_the_fields_of_its_schema(resources: dict[str, Any]):
    cluster = resources["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec.keys() <= CLUSTER
    assert spec["headGroupSpec"].keys() <= HEAD
    for group in spec["workerGroupSpecs"]:
        assert group.keys() <= WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        # The operator refuses parameters that are no strings.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"]["spec"]["containers"][0]["image"]


def test_its_ray_is_the_one_that_is_tested(resources: dict[str, Any]):
    pins = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={resources['RayCluster']['spec']['rayVersion']}" in pins


def test_the_job_runs_a_command_that_exists_and_asks_for_what_the_workers_have(
    resources: dict[str, Any],
):
    container = resources["Job"]["spec"]["template"]["spec"]["containers"][0]
    program, *words = container["command"]
    assert program == "tinkex"
    args = build_parser().parse_args(words)
    [group] = resources["RayCluster"]["spec"]["workerGroupSpecs"]
    assert parse_gpu_nodes(args.nodes[0]).count == group["replicas"]
    assert args.port == resources["Service"]["spec"]["ports"][0]["targetPort"]
    name = resources["RayCluster"]["metadata"]["name"]
    assert container["env"] == [{"name": "RAY_ADDRESS", "value": f"{name}-head-svc:6379"}]


def test_no_secret_is_written_into_a_resource(resources: dict[str, Any]):
    [group] = resources["RayCluster"]["spec"]["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "tinkex-node"}}]
    assert "TINKEX_DATABASE" not in {each["name"] for each in container["env"]}


def test_the_unit_of_systemd_restarts_and_drains(unit: configparser.ConfigParser):
    service = unit["Service"]
    assert (service["Restart"], service["KillSignal"]) == ("always", "SIGTERM")
    assert service["EnvironmentFile"], "secrets are in a file"
    program, *words = service["ExecStart"].split()
    assert program.endswith("/tinkex")
    assert build_parser().parse_args(words).data_dir == "/var/lib/tinkex/%i"
    assert service["Environment"] == "TINKEX_NODE_NAME=%H-%i"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path):
    # The program does not exist here; only that it does not is allowed to be said.
    copy = tmp_path / "tinkex-node@0.service"
    copy.write_text(UNIT.read_text().replace("/opt/tinkex/bin/tinkex", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert str(copy) not in done.stderr, done.stderr
