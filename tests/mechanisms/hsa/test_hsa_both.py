"""tying="both" by dynamic programming: optimality, layouts, gradients, biases, errors."""

import random

import pytest
import torch

from hf_hyperattn.analysis.hsa_certificate import loss_both, loss_key
from hf_hyperattn.engines import Options
from hf_hyperattn.hierarchy import Hierarchy, Tree
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.reference import definition_both, definition_key
from hf_hyperattn.mechanisms.hsa.tree import up_down
from hf_hyperattn.mechanisms.hsa.tree.both import attend_both, attend_both_with_root
from hf_hyperattn.mechanisms.hsa.tree.pair_terms import SiblingEmbeddings
from hf_hyperattn.mechanisms.selection.places import real_tokens
from tests.oracles import hsa
from tests.oracles.cases import assert_close, assert_gradients, qkv, tensor

INF = float("inf")


def attention_of(logits, hierarchy, keep_diagonal=True):
    """P and ρ(root) out of `attend_both_with_root`: the rows of S as queries, unit vectors as keys and values."""
    unit = torch.eye(len(logits), dtype=torch.float64)[None, None]
    P, root = attend_both_with_root(
        logits[None, None], unit, unit, hierarchy, 1.0, keep_diagonal=keep_diagonal
    )
    return P[0, 0], root[0, 0]


# Optimality.


@pytest.mark.parametrize("keep", [True, False])
def test_optimal_on_two_hundred_trees(keep):
    """The optimiser's P, the KL identity, and both-tied loss >= key-tied loss >= 0."""
    for seed in range(200):
        n = 2 + seed % 13
        tree = Tree.from_parents(hsa.random_parents(n, seed))
        S = tensor(n, n, seed=1000 + seed, scale=[0.5, 3.0, 8.0][seed % 3])
        P, root = attention_of(S, Hierarchy.of_trees([tree]), keep)
        expected = hsa.optimum(S.numpy(), hsa.ties(tree.parents.tolist(), n), keep)
        assert_close(P, expected, 1e-6, f"P of tree {seed}")
        full = S if keep else S.masked_fill(torch.eye(n, dtype=torch.bool), -INF)
        loss = hsa.divergence(P.numpy(), S, keep)
        assert loss == pytest.approx(float(full.logsumexp(-1).sum() - n * root), abs=1e-10)
        key_tied = hsa.divergence(definition_key(S, tree).numpy(), S)
        assert key_tied >= -1e-12
        if keep:
            assert loss >= key_tied - 1e-12


@pytest.mark.parametrize("keep", [True, False])
def test_flat_tree_is_softmax(keep):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=9)
    for flat in (
        Hierarchy.windows(9, ()),
        Hierarchy.of_trees([Tree.flat(9)]),
        Hierarchy.windows(9, (16, 32)),
    ):
        mask = None if keep else ~torch.eye(9, dtype=torch.bool)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        assert_close(attend_both(q, k, v, flat, keep_diagonal=keep), expected, 1e-12, "output")


# Layouts.


def with_statistics(q, k, scale, row, column):
    """Features with a number more a query [B, H, N] and a key [B, Hkv, N]: logits get both added, as a score's do."""
    one = lambda x: torch.ones_like(x[..., :1])
    q = torch.cat([q, row[..., None] / scale, one(q)], -1)
    return q, torch.cat([k, one(k), column[..., None] / scale], -1)


def dense(q, k, v, hierarchy, scale, keep=True, bias=None, row=None, column=None, embedding=None):
    """Output and ρ(root) by the definition, one row of the batch after the other; padding gives 0."""
    heads = q.shape[1]
    repeated = lambda x: x.repeat_interleave(heads // x.shape[1], 1)
    S = scale * q.double() @ repeated(k.double()).mT
    S = S if bias is None else S + bias
    S = S if row is None else S + row[..., None] + repeated(column)[:, :, None]
    out, roots = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64), []
    for b in range(len(q)):
        tree, at = hierarchy.tree(b), hierarchy.tokens_of(b)
        e = None if embedding is None else embedding(tree)
        P, root = definition_both(S[b][:, at][:, :, at], tree, keep, e)
        out[b, :, at] = P @ repeated(v.double())[b][:, at]
        roots.append(root)
    return out, torch.stack(roots)


def spans(batch, length, rng):
    """A padding mask with real tokens somewhere in every row."""
    mask = torch.zeros(batch, length, dtype=torch.long)
    for row in mask:
        start = rng.randrange(length)
        row[start : rng.randrange(start + 1, length + 1)] = 1
    return mask


def windows(batch, length, rng):
    return Hierarchy.windows(length, rng.choice([(2,), (2, 4), (3, 6, 12), (4, 16), ()]))


def padded_windows(batch, length, rng):
    return Hierarchy.windows(
        length, rng.choice([(2,), (2, 4), (3, 6, 12), (4, 16), ()]), spans(batch, length, rng)
    )


def one_tree(batch, length, rng):
    return Hierarchy.from_parents(hsa.random_parents(length, rng))


def padded_tree(batch, length, rng):
    tokens = sorted(rng.sample(range(length), max(1, length - 3)))
    return Hierarchy.from_parents(
        hsa.random_parents(len(tokens), rng), torch.tensor(tokens), length=length
    )


def forest(batch, length, rng):
    counts = [rng.randrange(1, length + 1) for _ in range(batch)]
    return Hierarchy.from_parents([hsa.random_parents(n, rng) for n in counts], length=length)


LAYOUTS = [windows, padded_windows, one_tree, padded_tree, forest]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep", [True, False])
def test_equals_the_definition_forward_and_backward(layout, keep):
    rng = random.Random(f"{layout.__name__} {keep}")
    for trial in range(8):
        batch, group, n = (
            rng.choice([1, 2, 3]),
            rng.choice([1, 3]),
            rng.choice([1, 2, 5, 9, 17, 23]),
        )
        hierarchy = layout(batch, n, rng)
        names = ["query", "key", "value"]
        inputs = list(qkv(batch, 2 * group, 2, n, d=4, dv=3, seed=trial, scale=2.0))
        if rng.random() < 0.5:
            names.append("bias")
            shape = (rng.choice([1, batch]), rng.choice([1, 2 * group]), n, n)
            inputs.append(tensor(*shape, seed=40 + trial))
        if rng.random() < 0.5:
            names += ["row", "column"]
            inputs += [tensor(batch, h, n, seed=h + trial, scale=3.0) for h in (2 * group, 2)]
        inputs = [t.requires_grad_() for t in inputs]
        rest = dict(zip(names[3:], inputs[3:], strict=True))
        expected, root = dense(*inputs[:3], hierarchy, 1.3, keep, **rest)
        q, k = (
            inputs[:2]
            if "row" not in rest
            else with_statistics(*inputs[:2], 1.3, rest["row"], rest["column"])
        )
        given = {"position_bias": rest.get("bias"), "keep_diagonal": keep}
        found, found_root = attend_both_with_root(q, k, inputs[2], hierarchy, 1.3, **given)
        assert_close(found, expected, 1e-11, "output")
        there = root.isfinite()
        assert torch.equal(there, found_root.isfinite())
        assert_close(found_root[there], root[there], 1e-11, "rho")
        weight = tensor(*expected.shape, seed=90 + trial)
        loss = lambda out, root, w=weight, there=there: (out * w).sum() + root[there].square().sum()
        grads = torch.autograd.grad(loss(found, found_root), inputs, allow_unused=True)
        wanted = torch.autograd.grad(loss(expected, root), inputs, allow_unused=True)
        wanted = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, wanted)]
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads)]
        assert_gradients(grads, wanted, 1e-9, names)
        with torch.no_grad():
            assert_close(
                attend_both(q, k, inputs[2], hierarchy, 1.3, **given), found, 0, "without tape"
            )


def test_gradcheck():
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, kv_heads=1, lq=7, d=2, seed=3))
    for hierarchy in (Hierarchy.windows(7, (2, 4)), one_tree(1, 7, random.Random(1))):
        for keep in (True, False):
            call = lambda q, k, v, h=hierarchy, keep=keep: attend_both_with_root(
                q, k, v, h, keep_diagonal=keep
            )
            assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(side):
    q, k, v = qkv(batch=2, heads=2, lq=21, d=4, seed=5)
    mask = torch.ones(2, 21, dtype=torch.long)
    real = slice(8, 21) if side == "left" else slice(0, 13)
    mask[1] = 0
    mask[1, real] = 1
    for x in (q, k, v):
        x[1, :, mask[1] == 0] = INF  # whatever stands there, nobody may see it
    out = attend_both(q, k, v, Hierarchy.windows(21, (4, 8), mask))
    alone = attend_both(
        q[1:, :, real], k[1:, :, real], v[1:, :, real], Hierarchy.windows(13, (4, 8))
    )
    assert_close(out[1:, :, real], alone, 1e-14, "padded row")
    assert_close(
        out[:1], attend_both(q[:1], k[:1], v[:1], Hierarchy.windows(21, (4, 8))), 1e-14, "full row"
    )
    assert not out[1, :, mask[1] == 0].any()


def test_special_tokens_under_the_root_keep_attention_of_their_own():
    """A leaf under the root is tied to nothing on its own side: its row is the softmax over sibling blocks."""
    parents = [8, 6, 6, 7, 7, 8, 8, 8, -1]
    q, k, v = qkv(batch=1, heads=1, lq=6, d=3)
    out = attend_both(q, k, v, Hierarchy.from_parents(parents))
    blocks = [[0], [1, 2], [3, 4], [5]]
    mean = lambda x: torch.stack([x[0, 0, b].mean(0) for b in blocks])
    logits = q[0, 0, 0] @ mean(k).T / 3**0.5 + torch.tensor([len(b) for b in blocks]).double().log()
    assert_close(
        out[0, 0, 0], torch.softmax(logits, -1) @ mean(v), 1e-12, "row of the special token"
    )


def test_windows_equal_their_tree():
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=50, d=4)
    for sizes in ((2, 4, 16), (3, 9), (7,)):
        found = Hierarchy.windows(50, sizes)
        assert_close(
            attend_both(q, k, v, found),
            attend_both(q, k, v, found.materialised),
            1e-12,
            f"windows {sizes}",
        )


def test_wide_families_in_blocks_of_rows(monkeypatch):
    """The same numbers, whether a family's matrix is formed at once or a few rows at a time."""
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=600, d=4))
    bias = tensor(1, 2, 600, 600, seed=9).requires_grad_()
    results = []
    for limit in (2**30, 2**14):
        monkeypatch.setattr(up_down, "BLOCK_ELEMENTS", limit)
        out = attend_both(q, k, v, Hierarchy.windows(600, (2,)), position_bias=bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))])
    for name, a, b in zip(("output", "query", "key", "value", "bias"), *results, strict=True):
        assert_close(a, b, 1e-12, name)


# Sibling embeddings.


def kinds_tree():
    """A document of two paragraphs and a row of patches."""
    parents = [10, 10, 10, 11, 11, 11, 11, 12, 12, 12, 13, 13, 13, -1]
    return parents, [0] * 10 + [1, 1, 2, 3], ("", "words", "patches", "parts")


def by_node(module, tree):
    """e of every node of a tree, [H, nodes, w], read from the tables one by one."""
    e = torch.zeros(
        module.tables[0].shape[1], tree.nodes, module.tables[0].shape[2], dtype=torch.float64
    )
    rank = [0] * tree.nodes
    first = [min(x) if x else 0 for x in hsa.under(tree.parents.tolist(), tree.leaves)]
    for parent in range(tree.leaves, tree.nodes):
        family = sorted(
            (c for c in range(tree.nodes) if tree.parents[c] == parent), key=first.__getitem__
        )
        for rank, child in enumerate(family):
            name = tree.kind_names[tree.kinds[parent]]
            if name:
                e[:, child] = module.tables[module.names.index(name)][rank].double()
    return e


@pytest.mark.parametrize("rows", [1, 2])
def test_sibling_embeddings(rows):
    parents, kinds, names = kinds_tree()
    other = [6, 6, 6, 7, 7, 7, 8, 8, -1], [0] * 6 + [2, 1, 3]
    several = [[parents, other[0]], [kinds, other[1]]] if rows == 2 else [parents, kinds]
    hierarchy = Hierarchy.from_parents(several[0], length=10, kinds=several[1], kind_names=names)
    torch.manual_seed(0)
    module = SiblingEmbeddings({"patches": 5, "words": 4, "parts": 3}, 4, 3, std=0.7).double()
    q, k, v = (t.requires_grad_() for t in qkv(batch=2, heads=4, kv_heads=2, lq=10, d=4, seed=6))
    leaves = [q, k, v, *module.parameters()]
    found = attend_both(q, k, v, hierarchy, siblings=module)
    expected, _ = dense(q, k, v, hierarchy, 0.5, embedding=lambda tree: by_node(module, tree))
    assert_close(found, expected, 1e-12, "output")
    weight = tensor(*found.shape, seed=7)
    grads = [torch.autograd.grad((o * weight).sum(), leaves) for o in (found, expected)]
    assert_gradients(*grads, 1e-9, ("query", "key", "value", *module.names))


def test_zero_embeddings_are_the_identity_and_kindless_families_have_none():
    parents, kinds, names = kinds_tree()
    q, k, v = qkv(batch=1, heads=2, lq=10, d=4)
    with_kinds = Hierarchy.from_parents(parents, kinds=kinds, kind_names=names)
    plain = attend_both(q, k, v, Hierarchy.from_parents(parents))
    zero = SiblingEmbeddings({"words": 4, "patches": 4, "parts": 3}, 2, 3, std=0)
    assert_close(attend_both(q, k, v, with_kinds, siblings=zero), plain, 0, "zero embeddings")
    some = SiblingEmbeddings({"words": 4}, 2, 3, std=1.0)
    assert_close(
        attend_both(q, k, v, Hierarchy.from_parents(parents), siblings=some), plain, 0, "no kinds"
    )


def test_missing_tables_are_refused():
    parents, kinds, names = kinds_tree()
    hierarchy = Hierarchy.from_parents(parents, kinds=kinds, kind_names=names)
    q, k, v = qkv(batch=1, heads=2, lq=10, d=4)
    with pytest.raises(
        ValueError, match="families of kind 'patches', which have no sibling embeddings"
    ):
        attend_both(q, k, v, hierarchy, siblings=SiblingEmbeddings({"words": 4, "parts": 4}, 2, 3))
    with pytest.raises(ValueError, match="'words' has 4 children; allowed: at most 3"):
        attend_both(
            q,
            k,
            v,
            hierarchy,
            siblings=SiblingEmbeddings({"words": 3, "parts": 4, "patches": 9}, 2, 3),
        )


# The certificate.


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep", [True, False])
def test_loss_of_both_is_the_divergence(layout, keep):
    q, k, _ = qkv(batch=3, heads=4, kv_heads=2, lq=13, d=4, seed=2, scale=2.0)
    hierarchy = layout(3, 13, random.Random(6))
    bias, column = tensor(1, 4, 13, 13, seed=3), tensor(3, 2, 13, seed=4)
    query, key = with_statistics(q, k, 6**-0.5, torch.zeros(3, 4, 13), column)
    rule = Rule("both", keep_diagonal=keep)
    found = loss_both(query * query.shape[-1] ** -0.5, key, hierarchy, rule, Options(bias=bias))
    S = (
        q @ k.repeat_interleave(2, 1).mT * 6**-0.5
        + bias
        + column.repeat_interleave(2, 1)[:, :, None]
    )
    for b in range(3):
        at = hierarchy.tokens_of(b)
        logits = S[b][:, at][:, :, at]
        P, _ = definition_both(logits, hierarchy.tree(b), keep)
        for h in range(4):
            expected = hsa.divergence(P[h].numpy(), logits[h], keep) if len(at) > 1 or keep else 0.0
            assert float(found[b, h]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_loss_of_keys_is_the_divergence_and_the_smaller_one(causal):
    q, k, _ = qkv(batch=2, heads=4, kv_heads=2, lq=24, d=4, seed=2, scale=3.0)
    hierarchy = Hierarchy.windows(24, (2, 4, 8))
    rules = {"near": 2, "sinks": 1, "refine_top_k": 1, "block_bias": -0.5}
    options = Options(is_causal=causal)
    found = loss_key(q / 2, k, hierarchy, Rule("key", **rules), options)
    S = q @ k.repeat_interleave(2, 1).mT / 2
    P = definition_key(S, hierarchy.tree(), is_causal=causal, **rules)
    seen = torch.ones(24, 24, dtype=torch.bool)
    logits = S.masked_fill(~seen.tril(), -1e30) if causal else S
    for b in range(2):
        for h in range(4):
            expected = hsa.divergence(P[b, h].numpy(), logits[b, h].numpy())
            assert float(found[b, h]) == pytest.approx(expected, abs=1e-9)
    if not causal:
        both = loss_both(q / 2, k, hierarchy, Rule("both"), options)
        assert (both >= loss_key(q / 2, k, hierarchy, Rule("key"), options) - 1e-12).all()
    assert (loss_key(q / 2, k, hierarchy, Rule("key"), options) >= 0).all()


# Errors and masks.


def test_other_tokens_are_refused():
    q, k, v = qkv(lq=5, lk=6)
    with pytest.raises(ValueError, match="5 queries, 6 keys and a hierarchy over 6 tokens"):
        attend_both(q, k, v, Hierarchy.windows(6, (2,)))
    q, k, v = qkv(batch=3, lq=6)
    with pytest.raises(ValueError, match="the hierarchy has 2 rows, the batch 3"):
        attend_both(q, k, v, Hierarchy.windows(6, (2,), torch.ones(2, 6)))


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_read_from_masks(additive, causal):
    real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    mask = real[:, None, None].expand(3, 1, 4, 4).clone()
    if causal:
        mask &= torch.ones(4, 4).tril().bool()
    mask[1, 0, 0] = True  # padded queries may see anything real
    mask[1, 0, 0, :2] = False
    given = (
        torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        if additive
        else mask
    )
    assert torch.equal(real_tokens(given, 4, causal), real)
    mask[0, 0, 3, 1] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, -INF) if additive else mask
    with pytest.raises(ValueError, match="hides token 1 from query 3 of row 0"):
        real_tokens(given, 4, causal)


def test_odd_masks_are_refused():
    with pytest.raises(ValueError, match="adds -1.5 to a logit"):
        real_tokens(torch.tensor([0.0, -1.5]).expand(1, 1, 2, 2), 2)
    with pytest.raises(ValueError, match="shows token 1 to query 0"):
        real_tokens(torch.ones(1, 1, 3, 3, dtype=torch.bool), 3, is_causal=True)
