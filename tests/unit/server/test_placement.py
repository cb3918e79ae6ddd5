"""Where keys and samples go, in the cases that have a name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tinkex.server.cluster.placement import moves, place, prefix_hash, route_sample, why_not
from tinkex.server.store.ownership import Claim, Node, NodeLoad, NodeModel


def _node(name: str, *bases: str, **changes: Any) -> Node:
    served = tuple(
        NodeModel(name=base, max_context_length=8, vocab_size=8) for base in bases or ("m",)
    )
    number = ord(name[0])
    node = Node(node_id=f"{name}-1", name=name, url="", version=1, number=number)
    return replace(node, base_models=served, **changes)


def _load(**changes: Any) -> NodeLoad:
    return NodeLoad(**changes)


def _name(node: Node | None) -> str | None:
    return None if node is None else node.name


def test_a_new_model_goes_where_most_memory_is_free():
    nodes = [
        _node("a", load=_load(models=1, resident_bytes=60, capacity_bytes=100)),
        _node("b", load=_load(models=3, resident_bytes=20, capacity_bytes=100)),
    ]
    assert _name(place(nodes, "m", "t")) == "b"


def test_with_about_as_much_memory_the_number_of_models_decides():
    nodes = [
        _node("a", load=_load(models=9, resident_bytes=27, capacity_bytes=100)),
        _node("b", load=_load(models=3, resident_bytes=30, capacity_bytes=100)),
    ]
    assert _name(place(nodes, "m", "t")) == "b"


def test_of_equal_nodes_the_one_with_fewer_models_of_the_tenant_is_chosen():
    nodes = [
        _node("a", load=_load(models=4, tenants={"t": 3, "u": 1})),
        _node("b", load=_load(models=4, tenants={"t": 1, "u": 3})),
    ]
    for number in range(20):  # whatever the hash of the key says
        assert _name(place(nodes, "m", "t", key=str(number))) == "b"
        assert _name(place(nodes, "m", "u", key=str(number))) == "a"


def test_a_tenants_spread_does_not_outweigh_a_crowd():
    nodes = [
        _node("a", load=_load(models=2, tenants={"t": 2})),
        _node("b", load=_load(models=50, tenants={"u": 50})),
    ]
    assert _name(place(nodes, "m", "t")) == "a"


def test_then_the_shortest_queue_decides():
    nodes = [_node("a", load=_load(queued_ops=4)), _node("b", load=_load(samples_running=3))]
    assert _name(place(nodes, "m", "t")) == "b"


def test_there_may_be_no_node_and_the_message_says_why():
    nodes = [
        _node("a", "m", state="draining"),
        _node("b", "m", expired=True),
        _node("c", "other", "third"),
        _node("d", "other"),
        _node("e", "m", state="dead"),
    ]
    assert place(nodes, "m", "t") is None
    text = why_not(nodes, "m")
    assert text == (
        "no node can take 'm' now: a is draining, b is silent (its lease has run out); "
        "the cluster serves 'other' by c, d; 'third' by c"
    )
    assert why_not(nodes, "x") == (
        "no node serves 'x'; the cluster serves 'other' by c, d; 'third' by c"
    )
    assert why_not([], "x") == "no node serves 'x'; the cluster serves nothing else"


def _claims(**counts: int) -> list[Claim]:
    return [
        Claim(key=f"{name}{i}", node_id=f"{name}-1", epoch=1, owner="t", base_model="m")
        for name, count in counts.items()
        for i in range(count)
    ]


def test_a_difference_of_one_moves_nothing_and_of_two_one_key():
    nodes = [_node("a"), _node("b")]
    assert moves(nodes, _claims(a=3, b=2), most=9) == []
    (move,) = moves(nodes, _claims(a=3, b=1), most=9)
    assert (move.source.name, move.target.name, move.reason) == ("a", "b", "balance")


def test_a_small_share_of_many_keys_moves_nothing():
    nodes = [_node("a"), _node("b")]
    assert moves(nodes, _claims(a=50, b=41), most=9) == []
    assert len(moves(nodes, _claims(a=50, b=40), most=9)) == 1


def test_keys_do_not_go_to_a_node_whose_memory_is_full_unless_theirs_is():
    full = _load(resident_bytes=95, capacity_bytes=100)
    free = _load(resident_bytes=5, capacity_bytes=100)
    claims = _claims(a=6)
    assert moves([_node("a", load=free), _node("b", load=full)], claims, most=9) == []
    assert len(moves([_node("a", load=full), _node("b", load=full)], claims, most=9)) == 3


def test_the_tenant_with_most_keys_there_moves_first_and_then_what_moved_least():
    claims = [
        Claim(key="k1", node_id="a-1", epoch=1, owner="u", base_model="m"),
        Claim(key="k2", node_id="a-1", epoch=5, owner="t", base_model="m"),
        Claim(key="k3", node_id="a-1", epoch=2, owner="t", base_model="m"),
    ]
    (move,) = moves([_node("a"), _node("b")], claims, most=9)
    assert move.claim.key == "k3"


def test_a_drained_node_is_emptied_before_anything_is_balanced():
    nodes = [_node("a", state="draining"), _node("b"), _node("c")]
    found = moves(nodes, _claims(a=2, b=9, c=1), most=2)
    assert [(move.reason, move.target.name) for move in found] == [("drain", "c")] * 2


@pytest.mark.parametrize(
    "changes", [{"expired": True, "state": "draining"}, {"expired": True}, {"state": "dead"}]
)
def test_a_node_that_cannot_hand_over_is_not_asked_to(changes: dict[str, Any]):
    assert moves([_node("a", **changes), _node("b")], _claims(a=5), most=9) == []


def test_a_target_that_drains_by_now_is_replaced():
    claim = Claim(key="k", node_id="a-1", epoch=1, owner="t", base_model="m", wanted="b-1")
    nodes = [_node("a", state="draining"), _node("b", state="draining"), _node("c")]
    (move,) = moves(nodes, [claim], most=9)
    assert move.target.name == "c"


# -- samples ---------------------------------------------------------------------------------------

NODES = [_node(name) for name in "abcd"]
PRESENT = {node.node_id for node in NODES}


def _routed(nodes: list[Node], number: int, **more: Any) -> Node:
    words: dict[str, Any] = {"base_model": "m", "version": "v", "present": PRESENT, **more}
    return route_sample(nodes, prefix_hash([number]), owner=nodes[0], **words)


def test_prompts_are_spread_with_a_slight_preference_for_the_owner():
    counts = Counter(_routed(NODES, number).name for number in range(2000))
    assert all(350 < counts[name] < 600 for name in "bcd")
    assert 500 < counts["a"] < 700


def test_one_prompt_stays_on_one_node():
    assert len({_routed(NODES, 7).name for _ in range(5)}) == 1


def test_an_overloaded_node_is_passed_over_and_others_keep_their_prompts():
    busy = [
        replace(node, load=_load(samples_running=100)) if node.name == "c" else node
        for node in NODES
    ]
    for number in range(200):
        before, after = _routed(NODES, number), _routed(busy, number)
        assert after.name != "c"
        assert before.name in ("c", after.name)


def test_what_the_owner_knows_to_be_running_counts_before_it_is_reported():
    assert _routed(NODES, 1, running={n.node_id: 99 for n in NODES[1:]}).name == "a"


def test_only_the_owner_computes_until_it_is_overloaded_and_then_one_more_node_fetches_it():
    assert {_routed(NODES, number, present=()).name for number in range(50)} == {"a"}
    running = {"a-1": 17}
    spilled = {_routed(NODES, n, present=(), running=running).name for n in range(50)}
    assert len(spilled) == 1
    assert spilled != {"a"}


def test_a_draining_owner_without_others_computes_itself():
    owner = _node("a", state="draining")
    assert route_sample([], b"", owner=owner, base_model="m", version="v") is owner
