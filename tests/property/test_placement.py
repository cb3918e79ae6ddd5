"""Placement for any cluster: no unfit node, moves that end, balance, spread, little movement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from tinkex.server.cluster.placement import can_take, moves, place, prefix_hash, route_sample
from tinkex.server.store.ownership import Claim, Node, NodeLoad, NodeModel

BASES = ("a", "b", "c")
ALL = 10_000

loads = st.builds(
    NodeLoad,
    models=st.integers(0, 20),
    resident_bytes=st.integers(0, 120),
    queued_ops=st.integers(0, 50),
    samples_running=st.integers(0, 50),
    tenants=st.dictionaries(st.sampled_from("xyz"), st.integers(1, 5)),
    capacity_bytes=st.sampled_from([0, 10, 100]),
)


def _node(number: int, **changes: object) -> Node:
    bases = changes.pop("bases", BASES)
    assert isinstance(bases, (tuple, set, frozenset))
    node = Node(
        node_id=f"n{number}-{number * 7919:x}",
        name=f"n{number}",
        url=f"http://n{number}",
        version=1,
        number=number,
        base_models=tuple(
            NodeModel(name=name, max_context_length=8, vocab_size=8) for name in sorted(bases)
        ),
    )
    return replace(node, **changes)


@st.composite
def any_nodes(draw: st.DrawFn, *, plain: bool = False) -> list[Node]:
    """Nodes in any state; if `plain`, all of them can take everything and know no capacity."""
    count = draw(st.integers(1, 7))
    if plain:
        return [_node(number) for number in range(count)]
    return [
        _node(
            number,
            bases=draw(st.sets(st.sampled_from(BASES))),
            role=draw(st.sampled_from(["full", "full", "full", "api"])),
            state=draw(st.sampled_from(["alive", "alive", "alive", "draining", "dead", "left"])),
            expired=draw(st.sampled_from([False, False, False, True])),
            load=draw(loads),
        )
        for number in range(count)
    ]


@st.composite
def clusters(draw: st.DrawFn, *, plain: bool = False) -> tuple[list[Node], list[Claim]]:
    nodes = draw(any_nodes(plain=plain))
    ids = [node.node_id for node in nodes]
    count = draw(st.integers(0, 60))
    # Few weights for many keys: most examples are lopsided.
    homes = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=4))
    claims = [
        Claim(
            key=f"k{number}",
            node_id=draw(st.sampled_from(homes)),
            epoch=draw(st.integers(1, 3)),
            owner=draw(st.sampled_from("xyz")),
            base_model=draw(st.sampled_from(BASES)),
            wanted=None if plain else draw(st.sampled_from([None, None, None, *ids])),
        )
        for number in range(count)
    ]
    return nodes, claims


def _applied(claims: list[Claim], found: list) -> list[Claim]:
    to = {move.claim.key: move.target.node_id for move in found}
    return [
        replace(claim, node_id=to[claim.key], wanted=None, epoch=claim.epoch + 1)
        if claim.key in to
        else claim
        for claim in claims
    ]


def _wanted(claims: list[Claim], found: list) -> list[Claim]:
    to = {move.claim.key: move.target.node_id for move in found}
    return [replace(claim, wanted=to.get(claim.key, claim.wanted)) for claim in claims]


def _counts(nodes: list[Node], claims: list[Claim]) -> list[int]:
    counted = Counter(claim.node_id for claim in claims)
    return [counted[node.node_id] for node in nodes]


# -- new keys --------------------------------------------------------------------------------------


@given(any_nodes(), st.sampled_from(BASES), st.sampled_from("xyz"), st.data())
def test_a_new_key_goes_to_a_fit_node_whenever_there_is_one(nodes, base_model, owner, data):
    avoid = data.draw(st.sets(st.sampled_from([node.node_id for node in nodes])))
    found = place(nodes, base_model, owner, key="k", avoid=avoid)
    fit = [n for n in nodes if can_take(n, base_model) and n.node_id not in avoid]
    assert (found is None) == (not fit)
    if found is not None:
        assert found.role == "full"
        assert found.state == "alive"
        assert not found.expired
        assert base_model in {model.name for model in found.base_models}
        assert found.node_id not in avoid


@given(any_nodes(), st.text(max_size=5), st.randoms())
def test_the_order_of_nodes_does_not_matter(nodes, key, random):
    other = list(nodes)
    random.shuffle(other)
    assert place(nodes, "a", "x", key=key) == place(other, "a", "x", key=key)


def _fill(nodes: list[Node], owners: list[str]) -> list[Node]:
    """The nodes after one model after the other was placed, with what they would report."""
    by_id = {node.node_id: node for node in nodes}
    for number, owner in enumerate(owners):
        chosen = place(by_id.values(), "a", owner, key=f"k{number}")
        assert chosen is not None
        tenants = {**chosen.load.tenants, owner: chosen.load.tenants.get(owner, 0) + 1}
        load = replace(chosen.load, models=chosen.load.models + 1, tenants=tenants)
        by_id[chosen.node_id] = replace(chosen, load=load)
    return list(by_id.values())


@given(st.integers(1, 6), st.integers(0, 40))
def test_the_models_of_a_tenant_are_spread_evenly(count, models):
    nodes = _fill([_node(n) for n in range(count)], ["x"] * models)
    counts = [node.load.models for node in nodes]
    assert max(counts) - min(counts) <= 1


@given(st.integers(2, 5), st.lists(st.sampled_from("xyz"), max_size=40))
def test_no_tenant_and_no_node_is_far_from_its_share(count, owners):
    nodes = _fill([_node(n) for n in range(count)], owners)
    for counts in (
        [node.load.models for node in nodes],
        *([node.load.tenants.get(owner, 0) for node in nodes] for owner in "xyz"),
    ):
        assert max(counts) - min(counts) <= 3


@given(st.integers(2, 6), st.integers(0, 30))
def test_a_burst_before_the_next_report_is_spread_by_its_keys(count, start):
    nodes = [_node(n) for n in range(count)]
    chosen = Counter(
        found.name
        for number in range(start, start + 40 * count)
        if (found := place(nodes, "a", "x", key=f"k{number}")) is not None
    )
    assert len(chosen) == count
    assert max(chosen.values()) <= 2 * 40


# -- moves -----------------------------------------------------------------------------------------


@given(clusters(), st.integers(0, 80))
def test_moves_go_from_owners_that_can_hand_over_to_fit_nodes(cluster, most):
    nodes, claims = cluster
    found = moves(nodes, claims, most=most)
    assert len(found) <= most
    assert len({move.claim.key for move in found}) == len(found)
    for move in found:
        assert can_take(move.target, move.claim.base_model)
        assert move.claim in claims
        assert move.source.node_id == move.claim.node_id != move.target.node_id
        assert move.source.state in ("alive", "draining")
        assert not move.source.expired


@given(clusters())
def test_after_all_moves_there_is_none_left(cluster):
    nodes, claims = cluster
    found = moves(nodes, claims, most=ALL)
    assert moves(nodes, _applied(claims, found), most=ALL) == []


@given(clusters())
def test_moves_that_were_asked_for_are_not_asked_for_again(cluster):
    nodes, claims = cluster
    found = moves(nodes, claims, most=ALL)
    assert moves(nodes, _wanted(claims, found), most=ALL) == []


@given(clusters(), st.integers(1, 5))
def test_a_few_moves_at_a_time_come_to_an_end(cluster, most):
    nodes, claims = cluster
    for _ in range(len(claims) * len(nodes) + 2):
        found = moves(nodes, claims, most=most)
        if not found:
            return
        claims = _applied(claims, found)
    raise AssertionError("moves never end")


@given(clusters())
def test_whatever_can_leave_a_draining_node_does(cluster):
    nodes, claims = cluster
    by_id = {node.node_id: node for node in nodes}
    found = moves(nodes, claims, most=ALL)
    after = _applied(claims, found)
    for claim in after:
        node = by_id[claim.node_id]
        target = by_id.get(claim.wanted or "")
        if node.state == "draining" and not node.expired:
            under_way = target is not None and can_take(target, claim.base_model)
            assert under_way or not any(can_take(n, claim.base_model) for n in nodes)
    reasons = [move.reason for move in found]
    assert reasons == sorted(reasons, key=("drain", "balance").index)


@given(clusters(plain=True))
def test_after_all_moves_nodes_differ_by_less_than_two_or_a_fifth(cluster):
    nodes, claims = cluster
    counts = _counts(nodes, _applied(claims, moves(nodes, claims, most=ALL)))
    assert max(counts) - min(counts) < max(2, -(-max(counts) // 5))
    assert sum(counts) == len(claims)


@given(clusters(plain=True))
def test_a_new_node_gets_its_share_and_nothing_moves_between_the_others(cluster):
    nodes, claims = cluster
    claims = _applied(claims, moves(nodes, claims, most=ALL))
    new = _node(99)
    found = moves([*nodes, new], claims, most=ALL)
    assert {move.target.node_id for move in found} <= {new.node_id}
    assert len(found) <= -(-len(claims) // (len(nodes) + 1))


@given(clusters(plain=True), st.data())
def test_a_lost_node_moves_nothing_that_others_own(cluster, data):
    nodes, claims = cluster
    assume(len(nodes) > 1)
    claims = _applied(claims, moves(nodes, claims, most=ALL))
    lost = data.draw(st.sampled_from(nodes))
    gone = replace(lost, state="dead")
    assert moves([gone if n is lost else n for n in nodes], claims, most=ALL) == []


@given(clusters())
def test_moves_depend_on_no_order(cluster):
    nodes, claims = cluster
    found = moves(nodes, claims, most=ALL)
    assert moves(nodes[::-1], claims[::-1], most=ALL) == found


# -- samples ---------------------------------------------------------------------------------------


def _route(nodes: list[Node], owner: Node, prefix: bytes, **more) -> Node:
    words = {"owner": owner, "base_model": "a", "version": "v1", **more}
    return route_sample(nodes, prefix, **words)


@given(any_nodes(), st.binary(max_size=8), st.data())
def test_a_sample_goes_to_a_fit_node_that_is_not_overloaded(nodes, prefix, data):
    owner = data.draw(st.sampled_from(nodes))
    present = data.draw(st.sets(st.sampled_from([node.node_id for node in nodes])))
    chosen = _route(nodes, owner, prefix, present=present)
    fit = [node for node in nodes if can_take(node, "a") or node is owner]
    work = {n.node_id: n.load.queued_ops + n.load.samples_running for n in fit}
    least = min(work.values())
    assert chosen in fit
    assert work[chosen.node_id] <= least * 1.25 + 16
    has_it = present | {owner.node_id}
    if chosen.node_id not in has_it:
        assert all(work[name] > least * 1.25 + 15 for name in work if name in has_it)
    assert _route(nodes[::-1], owner, prefix, present=present) == chosen


@given(st.integers(2, 6), st.lists(st.binary(max_size=6), min_size=1, max_size=50))
def test_a_new_sampling_node_takes_prompts_from_others_and_moves_no_other(count, prefixes):
    nodes = [_node(number) for number in range(count)]
    present = {node.node_id for node in nodes}
    new = _node(count)
    for prefix in prefixes:
        before = _route(nodes, nodes[0], prefix, present=present)
        after = _route([*nodes, new], nodes[0], prefix, present={*present, new.node_id})
        assert after in (before, new)


@given(st.lists(st.integers(0, 2**40), max_size=300), st.lists(st.integers(0, 9), max_size=20))
def test_prompts_that_begin_alike_have_one_hash(tokens, more):
    longer = [*tokens, *more]
    assert (prefix_hash(tokens) == prefix_hash(longer)) == (tokens[:128] == longer[:128])
