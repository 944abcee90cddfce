"""Trees in normal form: what is known of their nodes, their families, their tensor form; windows; joined signals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_hyperattn as ha
from hf_hyperattn.hierarchy import Hierarchy, Tree, as_hierarchy
from tests.oracles import trees as oracle
from tests.oracles.trees import random_parents

few = settings(max_examples=60, deadline=None)


def of(tree):
    """Our tree as nested lists."""
    return oracle.nested(tree.parents.tolist())


@few
@given(random_parents())
def test_the_normal_form_is_the_same_tree(parents):
    tree = Tree.from_parents(parents)
    assert of(tree) == oracle.nested(parents)
    again = Tree.from_parents(tree.parents)
    assert torch.equal(again.parents, tree.parents)
    count = torch.bincount(tree.parents[:-1], minlength=tree.nodes)
    assert bool((count[tree.leaves :] > 1).all()) or tree.leaves == 1
    assert (
        bool((tree.parents[:-1] > torch.arange(tree.nodes - 1)).all())
        and int(tree.parents[-1]) == -1
    )


@few
@given(random_parents())
def test_what_is_derived_equals_recursion(parents):
    tree = Tree.from_parents(parents)
    found = {}
    for node, depth in oracle.inner_nodes(of(tree)):
        found[tuple(sorted(oracle.leaves(node)))] = (node, depth)
    under = [set() for _ in range(tree.nodes)]
    for node in range(tree.nodes):
        under[node] |= {node} if node < tree.leaves else set()
        if node < tree.nodes - 1:
            under[int(tree.parents[node])] |= under[node]
    rows = [(p, c) for f in tree.families for p, c in zip(f.parent.tolist(), f.children.tolist())]
    children = {parent: [c for c in row if c >= 0] for parent, row in rows}
    for number in range(tree.leaves, tree.nodes):
        node, depth = found[tuple(sorted(under[number]))]
        assert int(tree.sizes[number]) == oracle.size(node) and int(tree.depth[number]) == depth
        assert int(tree.height[number]) == oracle.height(node)
        assert int(tree.first_leaf[number]) == oracle.first(node) and int(
            tree.branching[number]
        ) == len(node)
        assert [under[c] for c in children[number]] == [set(oracle.leaves(part)) for part in node]


@few
@given(random_parents(60))
def test_families_hold_every_inner_node_once_children_first(parents):
    tree = Tree.from_parents(parents)
    seen = set(range(tree.leaves))
    for family in tree.families:
        assert family.real.sum() * 2 > family.real.numel()  # less than half is filling
        assert len(set(tree.height[family.parent].tolist())) == 1
        for parent, row in zip(family.parent.tolist(), family.children.tolist(), strict=True):
            children = [child for child in row if child >= 0]
            assert row == children + [-1] * (len(row) - len(children))
            first = tree.first_leaf[children].tolist()
            assert first == sorted(first)
            assert all(int(tree.parents[c]) == parent for c in children) and seen.issuperset(
                children
            )
            seen.add(parent)
    assert seen == set(range(tree.nodes))


@few
@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_group_ids_equal_nested_groups(data, levels, length):
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=levels, max_size=levels),
            min_size=length,
            max_size=length,
        )
    )
    hierarchy = Hierarchy.from_segment_ids(torch.tensor([rows]))
    assert of(hierarchy.tree()) == oracle.by_ids(rows)


@few
@given(st.lists(random_parents(12), min_size=1, max_size=3), st.data())
def test_the_tensor_form_comes_back(parents, data):
    trees = [Tree.from_parents(p) for p in parents]
    length = max(t.leaves for t in trees) + data.draw(st.integers(0, 3))
    tokens = [sorted(data.draw(st.permutations(range(length)))[: t.leaves]) for t in trees]
    hierarchy = Hierarchy.of_trees(trees, tokens, length)
    ids = hierarchy.to_ids()
    assert ids.shape[:2] == (len(trees), length)
    assert torch.equal(
        ids[..., 0] < 0,
        torch.stack([~torch.isin(torch.arange(length), torch.tensor(t)) for t in tokens]),
    )
    again = Hierarchy.from_ids(ids)
    assert again.length == length
    for row, tree in enumerate(trees):
        assert torch.equal(again.tree(row).parents, tree.parents)
        assert again.tokens_of(row).tolist() == tokens[row]


@few
@given(random_parents(12), st.data())
def test_kinds_survive_the_tensor_form(parents, data):
    names = ("", "a", "b", "c")
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))
    hierarchy = Hierarchy.from_parents(parents, kinds=kinds, kind_names=names)
    again = Hierarchy.from_ids(hierarchy.to_ids(), names)
    leaf = torch.arange(hierarchy.tree().nodes) < hierarchy.tree().leaves
    assert torch.equal(again.tree().kinds[~leaf], hierarchy.tree().kinds[~leaf])
    assert torch.equal(again.tree().parents, hierarchy.tree().parents)


def test_kinds_without_names_are_numbered():
    ids = Hierarchy.quadtree(4, 4).to_ids()
    assert Hierarchy.from_ids(ids).kind_names == ("", "kind 1", "kind 2")


@few
@given(st.integers(1, 40), st.lists(st.integers(2, 4), max_size=4))
def test_windows_equal_their_definition(length, factors):
    sizes = [factors[0]] if factors else []
    for factor in factors[1:]:
        sizes.append(sizes[-1] * factor)
    hierarchy = Hierarchy.windows(length, sizes)
    rows = [[i // size for size in reversed(sizes)] for i in range(length)]
    expected = oracle.by_ids(rows) if sizes else list(range(length))
    assert of(hierarchy.tree()) == expected
    assert torch.equal(
        Hierarchy.from_ids(hierarchy.to_ids()).tree().parents, hierarchy.tree().parents
    )


@few
@given(
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([(2,), (2, 4), (3, 6), ()]),
)
def test_windows_start_at_the_first_real_token(real, left, right, sizes):
    mask = torch.tensor([[0] * left + [1] * real + [0] * right, [1] * (left + real + right)])
    hierarchy = Hierarchy.windows(mask.shape[1], sizes, mask)
    alone = Hierarchy.windows(real, sizes)
    assert torch.equal(hierarchy.tree(0).parents, alone.tree().parents)
    assert hierarchy.tokens_of(0).tolist() == list(range(left, left + real))
    again = Hierarchy.from_ids(hierarchy.to_ids())
    assert all(torch.equal(again.tree(r).parents, hierarchy.tree(r).parents) for r in range(2))


def test_windows_count_real_tokens_around_padding_in_between():
    mask = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1]])
    hierarchy = Hierarchy.windows(8, (2,), mask)
    assert of(hierarchy.tree()) == [[0, 1], [2, 3]] and hierarchy.tokens_of().tolist() == [
        1,
        3,
        4,
        7,
    ]


@few
@given(st.data(), st.integers(1, 8), st.integers(1, 5), st.integers(0, 3))
def test_growing_in_one_step_or_in_several(data, length, more, left):
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=length, max_size=length
        )
    )
    rows = [[-1, -1]] * left + rows
    first = Hierarchy.from_ids(torch.tensor([rows]))
    whole, steps = first.fitted(1, len(rows) + more), first
    for step in range(1, more + 1):
        steps = steps.fitted(1, len(rows) + step)
    assert torch.equal(whole.tree().parents, steps.tree().parents)
    assert (
        len(set(whole.tree().parents[length - 1 : length + more].tolist())) == 1
    )  # siblings of the last token
    back = whole.fitted(1, len(rows))
    assert torch.equal(back.tree().parents, first.tree().parents)


def test_windows_grow_by_windows():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    grown = Hierarchy.windows(5, (2, 4), mask).fitted(4, 9)
    assert grown.rows == 4 and of(grown.tree(0)) == of(grown.tree(1)) == [
        [[0, 1], [2, 3]],
        [[4, 5], 6],
    ]
    assert of(grown.tree(3)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], 8]


def test_growing_continues_the_last_group():
    hierarchy = Hierarchy.from_segment_ids(torch.tensor([[0, 0, 1, 1, 2], [0, 0, 1, 1, 1]]))
    assert [of(t) for t in hierarchy.fitted(2, 7).trees] == [
        [[0, 1], [2, 3], 4, 5, 6],
        [[0, 1], [2, 3, 4, 5, 6]],
    ]


@pytest.mark.parametrize(
    "sides", [(1, 1), (2, 2), (4, 4), (5, 6), (7, 7), (14, 14), (1, 5), (3, 17)]
)
@pytest.mark.parametrize("before, after", [(0, 0), (1, 0), (5, 1)])
def test_quadtrees_equal_nested_cells(sides, before, after):
    rows, columns = sides
    hierarchy = Hierarchy.quadtree(rows, columns, before, after)

    def cell(r, c, side):
        found = [
            before + i * columns + j
            for i in range(r, min(r + side, rows))
            for j in range(c, min(c + side, columns))
        ]
        if side == 1:
            return found
        half = side // 2
        return [
            cell(a, b, half)
            for a in (r, r + half)
            for b in (c, c + half)
            if a < rows and b < columns
        ]

    side = 1
    while side < max(sides):
        side *= 2
    inside = cell(0, 0, side)
    special = [*range(before), *range(before + rows * columns, before + rows * columns + after)]
    expected = oracle.collapsed([*special, *(inside if side > 1 else inside[:1])])
    assert of(hierarchy.tree()) == expected
    assert hierarchy.length == before + rows * columns + after


@few
@given(st.lists(random_parents(8), min_size=1, max_size=3), st.integers(0, 2))
def test_joined_signals(parents, special):
    parts = [
        Hierarchy.from_parents(p, kinds=[1] * len(p), kind_names=("", f"kind{i % 2}"))
        for i, p in enumerate(parents)
    ]
    joined = Hierarchy.join([special, *parts])
    start, expected = special, list(range(special))
    for part in parts:
        expected.append(shifted(of(part.tree()), start))
        start += part.length
    assert joined.length == start and of(joined.tree()) == oracle.collapsed(expected)
    tree = joined.tree()
    names = {tree.kind_names[k] for k in tree.kinds[tree.leaves :].tolist()}
    assert names <= {"signals", "kind0", "kind1"} and (
        special + len(parts) < 2 or "signals" in names
    )


def shifted(tree, by):
    return tree + by if isinstance(tree, int) else [shifted(part, by) for part in tree]


def test_batches_of_joined_signals_keep_padding():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    joined = Hierarchy.join([1, Hierarchy.windows(4, (2,), mask), Hierarchy.quadtree(2, 2)])
    assert [of(t) for t in joined.trees] == [
        [0, [[1, 2], 3], [4, 5, 6, 7]],
        [0, [[1, 2], [3, 4]], [5, 6, 7, 8]],
    ]
    assert joined.tokens_of(0).tolist() == [0, 2, 3, 4, 5, 6, 7, 8] and joined.length == 9
    again = Hierarchy.from_ids(joined.to_ids(), joined.kind_names)
    assert all(again.tree(r).same(joined.tree(r)) for r in range(2))


def test_spans_nest():
    spans = [(0, 6), (0, 3), (3, 6), (1, 3), (7, 9)]
    assert of(Hierarchy.from_spans(spans, 10).tree()) == [[[0, [1, 2]], [3, 4, 5]], 6, [7, 8], 9]
    assert of(Hierarchy.from_spans([(0, 4), (0, 4), (2, 3)], 4).tree()) == [0, 1, 2, 3]


def test_a_hierarchy_of_parents_is_one_row_or_several():
    one = Hierarchy.from_parents([3, 3, 4, 4, -1])
    several = Hierarchy.from_parents(
        [[3, 3, 4, 4, -1], torch.tensor([2, 2, -1])], tokens=[None, [1, 4]]
    )
    assert one.rows == 1 and several.rows == 2 and several.length == 5
    assert of(several.tree(0)) == of(one.tree()) == [[0, 1], 2] and of(several.tree(1)) == [0, 1]


def test_a_tensor_is_read_once():
    ids = torch.randint(0, 3, (2, 6, 2))
    assert as_hierarchy(ids) is as_hierarchy(ids)
    before = as_hierarchy(ids).tree().parents
    ids[0, :3] = 0
    assert as_hierarchy(ids) is as_hierarchy(ids) and before is not as_hierarchy(ids).tree().parents
    with torch.inference_mode():
        ids = torch.zeros(1, 3, dtype=torch.long)
        before = as_hierarchy(ids)
        assert as_hierarchy(ids) is before
        ids[0, 2] = 1
        assert as_hierarchy(ids).tree().nodes == before.tree().nodes + 1


def test_deep_and_long_trees():
    """A path of inner nodes, one leaf each, and windows of twelve levels."""
    leaves = 2048
    parents = [leaves] + [leaves + max(0, i - 1) for i in range(1, leaves)]
    parents += [leaves + i + 1 for i in range(leaves - 2)] + [-1]
    tree = Tree.from_parents(parents)
    assert int(tree.height[-1]) == len(tree.families) == leaves - 1 and torch.equal(
        tree.parents, torch.tensor(parents)
    )
    windows = Hierarchy.windows(8192, [2**i for i in range(1, 13)]).tree()
    assert (
        int(windows.height[-1]) == 13
        and len(windows.families) == 13
        and windows.nodes == 2 * 8192 - 1
    )


WRONG = {
    "two roots": (lambda: Tree.from_parents([2, 2, -1, -1]), "2 roots.*orphans"),
    "no root": (lambda: Tree.from_parents([2, 2, 3, 2]), "no root|0 roots"),
    "cycle": (lambda: Tree.from_parents([2, 4, 3, 2, -1]), "cycle"),
    "own parent": (lambda: Tree.from_parents([3, 3, 2, -1]), "cycle"),
    "out of range": (lambda: Tree.from_parents([2, 9, -1]), "out of range"),
    "no child": (lambda: Tree.from_parents([2, 2, -1, 2]), "inner nodes 3 cover no token"),
    "floats": (lambda: Tree.from_parents([1.0, -1.0]), "integers"),
    "nothing": (lambda: Tree.from_parents([]), "at least"),
    "kinds": (lambda: Tree.from_parents([1, -1], [0, 5]), "kinds goes from 0 to 5"),
    "number of kinds": (lambda: Tree.from_parents([1, -1], [0]), "one a node"),
    "sizes do not divide": (
        lambda: ha.Hierarchy.windows(9, (4, 6)),
        "6 is no larger multiple of 4",
    ),
    "sizes top first": (lambda: Hierarchy.windows(9, (16, 4)), "bottom first"),
    "equal sizes": (lambda: Hierarchy.windows(9, (4, 4)), "4 is no larger multiple of 4"),
    "size 1": (lambda: Hierarchy.windows(9, (1, 4)), "window size 1"),
    "size 2.0": (lambda: Hierarchy.windows(9, (2.0,)), "window size 2.0"),
    "length": (lambda: Hierarchy.windows(0, (2,)), "length=0"),
    "mask": (lambda: Hierarchy.windows(4, (2,), torch.ones(1, 3)), "attention_mask has shape"),
    "empty row": (lambda: Hierarchy.windows(2, (2,), torch.zeros(1, 2)), "without real tokens"),
    "empty ids": (lambda: Hierarchy.from_ids(torch.full((1, 3), -1)), "no token but padding"),
    "float ids": (lambda: Hierarchy.from_ids(torch.zeros(1, 3)), "integers"),
    "half padding": (
        lambda: Hierarchy.from_ids(torch.tensor([[[0, -1], [0, 0]]])),
        "token 0 of row 0",
    ),
    "overlap": (
        lambda: Hierarchy.from_spans([(0, 3), (2, 5)], 6),
        r"\(0, 3\) and \(2, 5\) overlap",
    ),
    "empty span": (lambda: Hierarchy.from_spans([(2, 2)], 6), r"span \(2, 2\)"),
    "span beyond": (lambda: Hierarchy.from_spans([(2, 7)], 6), r"span \(2, 7\)"),
    "patches": (lambda: Hierarchy.quadtree(0, 3), "rows=0"),
    "registers": (lambda: Hierarchy.quadtree(2, 3, before=-1), "before=-1"),
    "rows of parts": (
        lambda: Hierarchy.join([Hierarchy.from_ids(torch.zeros(n, 2).long()) for n in (2, 3)]),
        "rows",
    ),
    "nothing to join": (lambda: Hierarchy.join([2]), "at least one hierarchy"),
    "tokens": (lambda: Hierarchy.from_parents([2, 2, -1], [1, 0]), "ascending"),
    "number of tokens": (lambda: Hierarchy.from_parents([2, 2, -1], [1]), "one a leaf"),
    "short": (lambda: Hierarchy.from_parents([2, 2, -1], [1, 5], length=4), "length=4"),
    "batch": (
        lambda: Hierarchy.from_ids(torch.zeros(2, 2).long()).fitted(3, 2),
        "2 rows, the batch 3",
    ),
    "other length": (
        lambda: Hierarchy.windows(4, (2,)).fitted(1, 5, growing=False),
        "covers 4 tokens",
    ),
    "kind names": (
        lambda: Hierarchy.from_ids(Hierarchy.quadtree(4, 4).to_ids(), ("", "image")),
        "2 names, .* kind 2",
    ),
    "no hierarchy": (lambda: as_hierarchy([0, 1]), "is a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_is_allowed_in_one_line(case):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value) and "allowed" in str(error.value)
