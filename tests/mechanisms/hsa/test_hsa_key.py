"""Key-tied attention against covers that are built by brute force, for windows and for any tree."""

import random
from functools import partial

import pytest
import torch

from hf_hyperattn.engines import Options, dot_score
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy, Tree
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.pairs import count_pairs
from hf_hyperattn.mechanisms.hsa.reference import definition_key
from hf_hyperattn.mechanisms.hsa.request import Request, attend_hierarchically
from tests.mechanisms.hsa.hsa_calls import key_tied
from tests.mechanisms.hsa.test_hsa_both import with_statistics
from tests.oracles import hsa, key_tying, trees
from tests.oracles.cases import assert_close, tensor

INF = float("inf")
BIAS = torch.tensor([0.0, 0.5, -1.0, -INF], dtype=torch.float64)
LENGTHS = [1, 2, 5, 16, 17, 33, 37, 47, 64, 65, 70]
SIZES = [(4,), (4, 8), (2, 4, 8), (4, 16), (4, 12, 24), ()]


def inputs(length, batch=1, heads=4, kv_heads=2, seed=0, dtype=torch.float64):
    q = tensor(batch, heads, length, 5, seed=seed, scale=2, dtype=dtype)
    k = tensor(batch, kv_heads, length, 5, seed=seed + 1, scale=2, dtype=dtype)
    return q, k, tensor(batch, kv_heads, length, 3, seed=seed + 2, dtype=dtype)


def brute(q, k, v, sizes, start, stop, causal, near, sinks, top_k, bias=BIAS):
    """Output of one row [heads, M, dv]. A causal tree is built far to the right of the last token."""
    heads, length = q.shape[0], k.shape[1]
    last = stop
    if causal and sizes:
        last = start + (-(-(stop - start) // sizes[-1]) + 1) * sizes[-1]
    tree = key_tying.windows(start, last, sizes)
    visible = torch.zeros(length, max(last, length), dtype=torch.bool)
    visible[:, start:stop] = True
    visible = visible.tril() if causal else visible
    group = lambda i: key_tying.bottom_window(i, start, last, sizes[0] if sizes else 1)
    out = []
    for h in range(heads):
        kv = h * k.shape[0] // heads
        logits = torch.zeros(visible.shape, dtype=torch.float64)
        logits[:, :length] = q[h] @ k[kv].T * q.shape[-1] ** -0.5
        rule = {"near": near, "sinks": sinks, "top_k": top_k, "block_bias": float(bias[h])}
        P = key_tying.weights(
            logits, tree, group, visible=visible, order=list(range(start, last)), **rule
        )
        P[stop:] = 0
        out.append(P[:, :length] @ v[kv])
    return torch.stack(out)


def some_setting(seed):
    """A random length, hierarchy and rule; every fifth time with keys that are all alike, so that scores tie."""
    rng = random.Random(seed)
    causal = rng.random() < 0.5
    start, spare = rng.choice([0, 0, 3]), 0 if causal else rng.choice([0, 2])
    rule = {"near": rng.choice([0, 1, 2, 5, 9, 200]), "sinks": rng.choice([0, 1, 4, 7])}
    rule["refine_top_k"] = rng.choice([0, 0, 1, 2, 3])
    return rng.choice(LENGTHS), rng.choice(SIZES), start, spare, causal, rule


@pytest.mark.parametrize("seed", range(24))
def test_windows(seed):
    count, sizes, start, spare, causal, rule = some_setting(seed)
    stop = start + count
    q, k, v = inputs(stop + spare, seed=seed)
    k = k * 0 if seed % 5 == 0 else k
    there = Hierarchy(
        stop + spare, sizes=sizes, starts=torch.tensor([start]), stops=torch.tensor([stop])
    )
    out, _ = key_tied(q, k, v, there, **rule, block_bias=BIAS, is_causal=causal)
    expected = brute(q[0], k[0], v[0], sizes, start, stop, causal, *rule.values())
    assert_close(out[0], expected, 1e-12, f"{count} tokens in {sizes}, {rule}")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("causal", [False, True])
def test_any_tree_and_mask(seed, causal):
    """Groups need not be contiguous; what is visible is a random half of the pairs, the diagonal in it."""
    tree = Tree.from_parents(hsa.random_parents(4 + 3 * seed, seed))
    n, nested = tree.leaves, trees.nested(tree.parents.tolist())
    q, k, v = inputs(n, seed=seed)
    seen = (tensor(n, n, seed=seed) > -0.6) | torch.eye(n, dtype=torch.bool)
    near, sinks, top_k = [2, 0, 1, 3], [1, 2, 0, 0], [0, 1, 2, 1]
    mask = torch.zeros(n, n, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    if seed % 2:
        mask = seen
    out, weights = key_tied(
        q,
        k,
        v,
        Hierarchy.of_trees([tree]),
        near=near,
        sinks=sinks,
        refine_top_k=top_k,
        block_bias=BIAS,
        is_causal=causal,
        mask=mask,
        weights=True,
    )
    seen = seen.tril() if causal else seen
    S = q @ k.repeat_interleave(2, 1).mT * 5**-0.5
    parents = tree.parents.tolist()
    group = lambda i: [j for j in range(n) if parents[j] == parents[i]]
    for h in range(4):
        rule = {"near": near[h], "sinks": sinks[h], "top_k": top_k[h], "block_bias": float(BIAS[h])}
        P = key_tying.weights(S[0, h], nested, group, visible=seen, **rule)
        assert_close(weights[0, h], P, 1e-12, f"weights of head {h}")
        assert_close(out[0, h], P @ v[0, h // 2], 1e-12, f"output of head {h}")
    P = definition_key(
        S,
        tree,
        near=near,
        sinks=sinks,
        refine_top_k=top_k,
        block_bias=BIAS,
        is_causal=causal,
        visible=seen,
    )
    assert_close(weights, P, 1e-12, "the definition")


def test_a_batch_of_trees_with_padding():
    rows = [Tree.from_parents(hsa.random_parents(n, n)) for n in (9, 6)]
    tokens = [torch.arange(9), torch.tensor([1, 2, 4, 5, 7, 8])]
    q, k, v = inputs(9, batch=2)
    rule = {"near": 1, "sinks": 1, "refine_top_k": 1}
    out, _ = key_tied(q, k, v, Hierarchy.of_trees(rows, tokens), **rule)
    for b, (tree, index) in enumerate(zip(rows, tokens, strict=True)):
        row = (t[b : b + 1, :, index] for t in (q, k, v))
        alone, _ = key_tied(*row, Hierarchy.of_trees([tree]), **rule)
        assert_close(out[b : b + 1, :, index], alone, 1e-12, f"row {b}")
    padding = torch.ones(9, dtype=torch.bool).index_fill(0, tokens[1], False)
    assert (out[1][:, padding] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window_and_bias(causal):
    """A block that the window cuts is opened until its parts are whole; biases are averaged over blocks."""
    n, width = 37, 11
    q, k, v = inputs(n)
    bias = tensor(1, 4, n, n, seed=9)
    out, _ = key_tied(
        q, k, v, (4, 8), near=2, refine_top_k=1, window=width, bias=bias, is_causal=causal
    )
    apart = torch.arange(n)[:, None] - torch.arange(n)
    seen = (apart < width) & ((apart >= 0) if causal else (apart > -width))
    last = 40 if causal else n
    for h in range(4):
        S = torch.zeros(n, last, dtype=torch.float64)
        S[:, :n] = q[0, h] @ k[0, h // 2].T * 5**-0.5 + bias[0, h]
        visible = torch.zeros(n, last, dtype=torch.bool)
        visible[:, :n] = seen
        group = lambda i: key_tying.bottom_window(i, 0, last, 4)
        P = key_tying.weights(
            S, key_tying.windows(0, last, (4, 8)), group, near=2, top_k=1, visible=visible
        )
        assert_close(out[0, h], P[:, :n] @ v[0, h // 2], 1e-12, f"head {h}")


@pytest.mark.parametrize(
    "setting", [{"near": 33}, {"refine_top_k": 33}, {"sinks": 33}, {"hierarchy": ()}]
)
@pytest.mark.parametrize("causal", [False, True])
def test_identities(setting, causal):
    """All open, or nothing to close: ordinary attention; one head of four is left as it is."""
    q, k, v = inputs(33)
    setting = {"hierarchy": (4, 8), "near": 0, **setting}
    out, _ = key_tied(q, k, v, setting.pop("hierarchy"), is_causal=causal, **setting)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    assert_close(out, expected, 1e-12, "ordinary attention")


def test_one_head_of_four_is_exact():
    q, k, v = inputs(33)
    out, _ = key_tied(q, k, v, (4, 8), near=[0, 33, 0, 0], is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert_close(out[:, 1], expected[:, 1], 1e-12, "the exact head")
    assert ((out - expected)[:, [0, 2, 3]].abs().amax((0, 2, 3)) > 1e-3).all()


def test_column_sink_and_scale():
    """A key's own term, averaged like the logits; a logit without a value."""
    q, k, v = inputs(21)
    sink, column = tensor(4, seed=4), tensor(1, 2, 21, seed=5)
    given = {"near": 3, "sinks": 1, "refine_top_k": 1, "scale": 0.3, "sink_logit": sink}
    out, _ = key_tied(
        *with_statistics(q, k, 0.3, torch.zeros(1, 4, 21), column), v, (4, 8), **given
    )
    for h in range(4):
        S = 0.3 * q[0, h] @ k[0, h // 2].T + column[0, h // 2]
        group = lambda i: key_tying.bottom_window(i, 0, 21, 4)
        P = key_tying.weights(S, key_tying.windows(0, 21, (4, 8)), group, near=3, sinks=1, top_k=1)
        tied = torch.full_like(
            S, -INF
        )  # the cover's own log-sum-exp, from P up to a row constant: P_ii is exact
        tied = S.diagonal() - P.diagonal().log()
        share = 1 / (1 + torch.exp(sink[h] - tied))
        assert_close(out[0, h], share[:, None] * (P @ v[0, h // 2]), 1e-11, f"head {h}")


def test_what_is_refused():
    q, k, v = inputs(33)
    call = partial(hierarchical_attention, q, k, v, tying="key", enable_gqa=True)
    with pytest.raises(ValueError, match="backend='flash'.*auto"):
        call(hierarchy=(4,), backend="flash")
    with pytest.raises(ValueError, match="cannot compute a mask.*'torch'"):
        key_tied(q, k, v, (4,), mask=torch.ones(33, 33, dtype=torch.bool), backend="native")
    with pytest.raises(ValueError, match="6 is no larger multiple of 4"):
        call(hierarchy=(4, 6))
    with pytest.raises(ValueError, match="covers 32 tokens, attention has 33"):
        call(hierarchy=Hierarchy.windows(32, (4,)))


@pytest.mark.parametrize("seed", range(12))
def test_counted_pairs(seed):
    """The count of `count_pairs` is that of covers built one by one."""
    count, sizes, _, _, causal, rule = some_setting(100 + seed)
    top_k = rule.pop("refine_top_k") if causal else rule.pop("refine_top_k") * 0
    last = count if not (causal and sizes) else (-(-count // sizes[-1]) + 1) * sizes[-1]
    tree, row = key_tying.collapse(key_tying.windows(0, last, sizes)), tensor(last, seed=seed)
    expected = 0
    for i in range(count):
        seen, group = (
            set(range(i + 1 if causal else count)),
            key_tying.bottom_window(i, 0, last, (*sizes, 1)[0]),
        )
        cover = key_tying.cover(tree, i, seen, set(range(rule["sinks"])), group, rule["near"])
        expected += len(key_tying.refine(cover, row, top_k))
    assert (
        count_pairs(count, sizes, **rule, top_k=top_k, is_causal=causal, compared=False) == expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [9, 10, 13, 17])
def test_a_single_token_at_the_ragged_end_is_not_refined(length, dtype):
    """It is that token, not a block: with the best score of all, it takes no place among the refined blocks."""
    q, k, v = inputs(length, heads=2, kv_heads=2, dtype=dtype)
    k[..., -1, :] = 8 * q.mean(2)
    tree = Tree.from_parents(hsa.windows_parents(length, (2, 4)))
    expected = definition_key(q @ k.mT * 5**-0.5, tree, refine_top_k=1) @ v.double()
    out = key_tied(q, k, v, (2, 4), refine_top_k=1)[0]
    assert_close(out.double(), expected, 1e-10 if dtype == torch.float64 else 1e-4, "output")


def test_counted_pairs_where_everything_is_refined():
    """All blocks opened, the pairs are those of ordinary attention; the last token alone is no block."""
    for length in (9, 13, 16):
        assert count_pairs(length, (2,), 0, 0, length, is_causal=False, compared=False) == length**2


@pytest.mark.parametrize("columns", [1, 9])
def test_a_bias_that_is_the_same_for_all_keys_counts_beside_a_sink(columns):
    """A sink has no bias. With every token near, attention is plain, with one more logit in the softmax."""
    query, key, value = (tensor(1, 2, 9, 4, seed=seed) for seed in range(3))
    bias = tensor(1, 2, 9, 1, seed=3).expand(1, 2, 9, columns)
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64)
    rule = Rule("key", near=100)
    request = Request(hierarchy=(3,), rule=rule, is_causal=True)
    options = Options(is_causal=True, bias=bias, sinks=sinks)
    out, _ = attend_hierarchically(dot_score(query, key, 0.5), value, options, request)
    logits = 0.5 * query @ key.mT + bias
    logits = logits.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), float("-inf"))
    sink = sinks[:, None, None].expand(1, 2, 9, 1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    assert_close(out, weights @ value, 1e-9)
