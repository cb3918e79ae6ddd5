"""What `--nodes` means, how nodes are named, and what they are started with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinkex.errors import InputError
from tinkex.ray_cluster.changes import plan_changes
from tinkex.ray_cluster.nodes import (
    NodeGroup,
    NodeSpec,
    check_cluster_name,
    node_arguments,
    node_specs,
    parse_cpu_nodes,
    parse_gpu_nodes,
)
from tinkex.ray_cluster.placement import Machine, missing_resources


def specs(count: int = 2, model: str = "tinkex/tiny") -> list[NodeSpec]:
    return node_specs("lab", [NodeGroup(kind="cpu", count=count, base_model=model)])


def test_nodes_with_gpus():
    group = NodeGroup(kind="gpu", count=4, base_model="Qwen/Qwen3-8B")
    assert parse_gpu_nodes("Qwen/Qwen3-8B=4xGPU") == group


def test_a_model_in_a_folder_keeps_its_folder():
    assert parse_gpu_nodes("mine=/models/mine=1xgpu").base_model == "mine=/models/mine"
    assert parse_cpu_nodes("mine=/models/mine=3").count == 3


@pytest.mark.parametrize("text", ["Qwen3", "=4xGPU", "Qwen3=4", "Qwen3=GPU", "Qwen3=-1xGPU", ""])
def test_malformed_nodes_are_refused_with_an_example(text: str):
    with pytest.raises(InputError, match="4xGPU"):
        parse_gpu_nodes(text)


@pytest.mark.parametrize("text", ["tiny", "=2", "tiny=", "tiny=2xGPU"])
def test_malformed_nodes_on_cpus_are_refused_with_an_example(text: str):
    with pytest.raises(InputError, match="tinkex/tiny=2"):
        parse_cpu_nodes(text)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a" * 64])
def test_a_name_that_cannot_be_part_of_an_actors_name_is_refused(name: str):
    with pytest.raises(InputError, match="name"):
        check_cluster_name(name)


def test_fewer_nodes_have_the_names_of_the_first():
    assert [s.name for s in specs(3)][:2] == [s.name for s in specs(2)]


def test_the_same_model_named_twice_is_one_group():
    twice = [NodeGroup(kind="cpu", count=1, base_model="m")] * 2
    assert [s.name[-2:] for s in node_specs("lab", twice)] == ["-0", "-1"]


def test_models_of_two_organisations_have_nodes_of_their_own():
    both = [NodeGroup(kind="cpu", count=1, base_model=f"{org}/tiny") for org in ("a", "b")]
    assert len({s.name for s in node_specs("lab", both)}) == 2


def test_every_node_has_a_port_of_its_own():
    group = NodeGroup(kind="gpu", count=2, base_model="m")
    api = NodeGroup(kind="api", count=1)
    made = node_specs("lab", [group, api], port_base=9000)
    assert [(s.port, s.gpus, s.kind) for s in made] == [
        (9000, 1.0, "gpu"),
        (9001, 1.0, "gpu"),
        (9002, 0.0, "api"),
    ]
    with pytest.raises(InputError, match="leaves no ports"):
        node_specs("lab", [group], port_base=65535)


def test_the_command_line_of_a_node_joins_the_cluster_and_has_no_database():
    [spec] = specs(1)
    words = " ".join(node_arguments(spec, host="10.0.0.1", data_dir="/tmp/x"))
    assert f"--join lab --node-name {spec.name}" in words
    assert "--base-model tinkex/tiny --device cpu" in words
    assert "--database" not in words


def test_a_node_without_an_engine_has_no_model():
    [api] = node_specs("lab", [NodeGroup(kind="api", count=1)])
    words = node_arguments(api, host="h", data_dir="d")
    assert words[-2:] == ["--role", "api"]
    assert "--base-model" not in words


# -- changes -------------------------------------------------------------------------------------


def test_a_running_cluster_is_changed_and_not_started_again():
    first, second, third = specs(3)
    changes = plan_changes(
        [first, second, third], {first.name: True, second.name: False, "x": True}
    )
    assert changes.keep == (first,)
    assert changes.replace == (second,)
    assert changes.add == (third,)
    assert changes.remove == ("x",)


def test_nothing_changes_when_everything_is_as_asked():
    wanted = specs(2)
    changes = plan_changes(wanted, {spec.name: True for spec in wanted})
    assert changes.keep == tuple(wanted)
    assert changes.remove + changes.replace + changes.add == ()


# -- placement -----------------------------------------------------------------------------------


def test_demanded_is_set_against_free():
    gpu = [replace(spec, gpus=1.0) for spec in specs(2)]
    machines = [
        Machine(node_id="ab" * 14, address="10.0.0.1", total={"CPU": 8, "GPU": 2}, free={"CPU": 6}),
        Machine(node_id="cd" * 14, address="10.0.0.2", total={"CPU": 4.0}, free={"CPU": 0.5}),
    ]
    text = missing_resources(gpu, machines).splitlines()
    assert text[0].startswith("demanded: 2 x (1 GPU, 1 CPU), for cpu-tiny-")
    assert text[1:] == [
        "free on 10.0.0.1 (abababab): 0 of 2 GPU, 6 of 8 CPU",
        "free on 10.0.0.2 (cdcdcdcd): 0.5 of 4 CPU",
    ]


def test_a_ray_cluster_without_machines_is_said_to_have_none():
    assert "Ray has no machine" in missing_resources(specs(6), [])
    assert "and 2 more" in missing_resources(specs(6), [])
