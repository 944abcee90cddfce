"""The dense definitions of both tyings: against optima and covers found by brute force, and by hand."""

import math
import random

import numpy as np
import pytest
import torch

from hf_hyperattn.hierarchy import Tree
from hf_hyperattn.mechanisms.hsa.reference import definition_both, definition_key
from tests.oracles import hsa
from tests.oracles.cases import assert_close, tensor

INF = float("inf")


def logits(n, seed, scale=3.0, heads=()):
    return tensor(*heads, n, n, seed=seed, scale=scale)


def random_tree(n, seed):
    """A tree of ours, and its parents for the oracle, in the same numbering and without chains."""
    tree = Tree.from_parents(hsa.random_parents(n, seed))
    return tree, tree.parents.tolist()


# Both sides tied.


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_both_is_the_constrained_optimum(seed, keep):
    tree, parents = random_tree(2 + seed, seed)
    S = logits(tree.leaves, seed)
    P, _ = definition_both(S, tree, keep)
    assert_close(P, hsa.optimum(S.numpy(), hsa.ties(parents, tree.leaves), keep), 1e-8, "P")


def test_both_by_hand():
    """Leaves 0, 1 under a node, 2 beside it: one tie, P_02 = P_12 = w, found as the minimum over w on a grid."""
    S = logits(3, 5)
    P, root = definition_both(S, Tree.from_parents([3, 3, 4, 4, -1]))
    grid = np.linspace(1e-6, 1 - 1e-6, 200_001)
    pair = [math.log(math.exp(S[i, 0]) + math.exp(S[i, 1])) for i in (0, 1)]
    cost = 2 * (grid * np.log(grid) + (1 - grid) * np.log(1 - grid))
    cost -= grid * float(S[0, 2] + S[1, 2]) + (1 - grid) * sum(pair)
    assert float(P[0, 2]) == float(P[1, 2])
    assert float(P[0, 2]) == pytest.approx(grid[cost.argmin()], abs=2e-5)
    assert_close(P[0, :2] / P[0, :2].sum(), torch.softmax(S[0, :2], -1), 1e-12, "inside")
    assert_close(P[2, :2], P[2, 0].expand(2), 0, "row of the single leaf")
    lse = float(torch.logsumexp(S, -1).sum())
    assert hsa.divergence(P.numpy(), S) == pytest.approx(lse - 3 * float(root), abs=1e-12)


@pytest.mark.parametrize("keep", [True, False])
def test_flat_tree_is_softmax(keep):
    S = logits(7, 1, heads=(2,))
    P, root = definition_both(S, Tree.flat(7), keep)
    S = S if keep else S.masked_fill(torch.eye(7, dtype=torch.bool), -INF)
    assert_close(P, torch.softmax(S, -1), 1e-14, "P")
    assert_close(root, torch.logsumexp(S, -1).mean(-1), 1e-13, "rho of the root")


def test_one_leaf():
    S = torch.tensor([[1.5]])
    P, root = definition_both(S, Tree.flat(1))
    assert float(P) == 1.0 and float(root) == 1.5
    P, root = definition_both(S, Tree.flat(1), keep_diagonal=False)
    assert float(P) == 0.0 and float(root) == -INF
    assert float(definition_key(S, Tree.flat(1))) == 1.0


def test_chains_change_nothing():
    S = logits(4, 2)
    plain = Tree.from_parents([4, 4, 5, 5, 6, 6, -1])
    chained = Tree.from_parents([4, 4, 5, 5, 7, 8, -1, 9, 6, 6])
    assert_close(definition_both(S, chained)[0], definition_both(S, plain)[0], 0, "P")
    assert_close(definition_key(S, chained), definition_key(S, plain), 0, "P, keys tied")


def test_sibling_embeddings_add_to_the_means():
    """The same as adding e_A·e_B to every logit of the pair of blocks, off the diagonal."""
    tree, parents = random_tree(9, 3)
    S, e = logits(9, 3), tensor(tree.nodes, 4, seed=8)
    shifted = S.clone()
    for i in range(9):
        for j in range(9):
            if i != j:
                a, b = hsa.parting(parents, i, j)
                shifted[i, j] += e[a] @ e[b]
    expected, root = definition_both(shifted, tree)
    found, found_root = definition_both(S, tree, embedding=e)
    assert_close(found, expected, 1e-12, "P")
    assert_close(found_root, root, 1e-12, "rho")


# Keys tied.

RULES = {
    "nothing": {},
    "near": {"near": 2},
    "sinks": {"sinks": 3},
    "top": {"refine_top_k": 1},
    "bias": {"block_bias": -1.3},
    "all": {"near": 2, "sinks": 2, "refine_top_k": 2, "block_bias": 0.4},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_key_equals_the_cover_by_brute_force(rules, causal):
    for seed in range(5):
        tree, parents = random_tree(3 + 3 * seed, seed)
        S = logits(tree.leaves, seed)
        expected = hsa.key_attention(S.numpy(), parents, causal=causal, **rules)
        assert_close(
            definition_key(S, tree, is_causal=causal, **rules), expected, 1e-12, f"P of tree {seed}"
        )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_key_under_any_mask(rules):
    rng = random.Random(4)
    for seed in range(4):
        tree, parents = random_tree(14, seed)
        S = logits(14, seed)
        seen = torch.tensor([[rng.random() < 0.7 for _ in range(14)] for _ in range(14)])
        seen[3] = False
        expected = hsa.key_attention(S.numpy(), parents, visible=seen.numpy(), **rules)
        assert_close(definition_key(S, tree, visible=seen, **rules), expected, 1e-12, "P")
        assert not expected[3].any()


def test_a_window_of_one_token_is_no_block():
    """Nine tokens in windows of 2: the last stands alone, and leaves the place of refinement to a window."""
    tree = Tree.from_parents(hsa.windows_parents(9, (2,)))
    S = torch.tensor([0.0, 0.0, 1.0, 3.0, 2.0, 2.5, 0.0, 0.0, 50.0]).expand(9, 9)
    P = definition_key(S, tree, refine_top_k=1)
    logits = np.array(
        [0.0, 0.0, 2.0, 2.0, 2.0, 2.5, 0.0, 0.0, 50.0]
    )  # of the windows, {4, 5} has the largest mean
    assert_close(P[0], np.exp(logits) / np.exp(logits).sum(), 1e-12, "query 0")


def test_key_by_hand():
    """Eight tokens in windows of 2 and 4, causal: what the last query and the first see."""
    tree = Tree.from_parents(hsa.windows_parents(8, (2, 4)))
    S = torch.zeros(8, 8)
    S[7] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    P = definition_key(S, tree, is_causal=True)
    blocks = np.array([2.5] * 4 + [5.5] * 2 + [7.0, 8.0])
    assert_close(P[7], np.exp(blocks) / np.exp(blocks).sum(), 1e-12, "query 7")
    assert_close(P[0], np.eye(8)[0], 0, "query 0")
    P = definition_key(
        S, tree, is_causal=True, near=2
    )  # window {6, 7}: token 5 is 1 away, token 3 is 3 away
    blocks = np.array([2.5] * 4 + [5.0, 6.0, 7.0, 8.0])
    assert_close(P[7], np.exp(blocks) / np.exp(blocks).sum(), 1e-12, "query 7, near 2")
    P = definition_key(S, tree, is_causal=True, sinks=1)
    blocks = np.array([1.0, 2.0, 3.5, 3.5, 5.5, 5.5, 7.0, 8.0])
    assert_close(P[7], np.exp(blocks) / np.exp(blocks).sum(), 1e-12, "query 7, sinks 1")
    P = definition_key(S, tree, is_causal=True, refine_top_k=1)
    # level 1: {0..3} opens; level 2: of {0,1}, {2,3}, {4,5} the last has the largest mean, and opens
    blocks = np.array([1.5, 1.5, 3.5, 3.5, 5.0, 6.0, 7.0, 8.0])
    assert_close(P[7], np.exp(blocks) / np.exp(blocks).sum(), 1e-12, "query 7, top 1")
    P = definition_key(S, tree, is_causal=True, block_bias=-INF)
    assert_close(
        P[7], np.array([0.0] * 6 + [1, math.e]) / (1 + math.e), 1e-12, "query 7, blocks dropped"
    )


def test_rules_per_head():
    tree, _ = random_tree(12, 7)
    S = logits(12, 7, heads=(2, 3))
    rules = {
        "near": [0, 2, 3],
        "sinks": [1, 0, 2],
        "refine_top_k": [0, 1, 2],
        "block_bias": [0.0, -1.0, -INF],
    }
    P = definition_key(S, tree, **rules)
    for head in range(3):
        alone = definition_key(
            S[:, head], tree, **{name: value[head] for name, value in rules.items()}
        )
        assert_close(P[:, head], alone, 0, f"head {head}")


@pytest.mark.parametrize("causal", [False, True])
def test_enough_of_any_rule_is_softmax(causal):
    tree, _ = random_tree(13, 9)
    S = logits(13, 9)
    masked = S.masked_fill(~torch.ones(13, 13, dtype=torch.bool).tril(), -INF) if causal else S
    for rules in ({"near": 14}, {"sinks": 13}, {"refine_top_k": 13}):
        P = definition_key(S, tree, is_causal=causal, **rules)
        assert_close(P, torch.softmax(masked, -1), 1e-14, str(rules))


def test_key_gradients():
    tree, _ = random_tree(8, 2)
    S = logits(8, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda S: definition_key(S, tree, near=2, refine_top_k=1), (S,))
