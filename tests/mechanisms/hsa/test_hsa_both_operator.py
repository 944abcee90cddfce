"""tying="both" as an operator: the same numbers as without the compiler, for every layout, and one graph."""

import random

import pytest
import torch

from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa import operator
from hf_hyperattn.mechanisms.hsa.tree.both import attend_both_with_root, call_operator, compute_both
from hf_hyperattn.mechanisms.hsa.tree.pair_terms import SiblingEmbeddings
from tests.mechanisms.hsa.test_hsa_both import LAYOUTS, kinds_tree
from tests.oracles import hsa
from tests.oracles.cases import assert_close, assert_gradients, qkv, tensor

NAMES = ("query", "key", "value", "bias", "tables")


def both_ways(inputs, hierarchy, bias, tables, keep):
    """Output, ρ and gradients by the operator and by what it computes."""
    found = []
    for way in (call_operator, compute_both):
        out, root = way(*inputs[:3], hierarchy, 0.7, keep, bias, tables)
        loss = (out * tensor(*out.shape, seed=5)).sum() + torch.where(
            root.isfinite(), root, 0.0
        ).square().sum()
        found.append((out, root, torch.autograd.grad(loss, inputs)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("biased", [False, True])
def test_operator_equals_what_it_computes(layout, biased):
    rng = random.Random(layout.__name__)
    inputs = [*qkv(batch=2, heads=4, kv_heads=2, lq=11, d=4), tensor(1, 4, 11, 11, seed=3)][
        : 4 if biased else 3
    ]
    inputs = [t.requires_grad_() for t in inputs]
    bias = inputs[3] if biased else None
    (out, root, grads), (expected, wanted, slopes) = both_ways(
        inputs, layout(2, 11, rng), bias, None, True
    )
    assert_close(out, expected, 1e-12, "output")
    assert_close(root, wanted, 1e-12, "rho")
    assert_gradients(grads, slopes, 1e-10, NAMES)


@pytest.mark.parametrize("rows", [1, 2])
def test_operator_with_sibling_embeddings(rows):
    parents, kinds, names = kinds_tree()
    trees = [parents, parents[:-1] + [-1]], [kinds, kinds]
    given = [trees[0], trees[1]] if rows == 2 else [parents, kinds]
    hierarchy = Hierarchy.from_parents(given[0], kinds=given[1], kind_names=names)
    module = SiblingEmbeddings({"words": 4, "patches": 4, "parts": 3}, 4, 3, std=0.5).double()
    inputs = [t.requires_grad_() for t in qkv(batch=2, heads=4, kv_heads=2, lq=10, d=4)]
    inputs += list(module.parameters())
    (out, _, grads), (expected, _, slopes) = both_ways(
        inputs, hierarchy, None, module.by_kind(), False
    )
    assert_close(out, expected, 1e-12, "output")
    assert_gradients(grads, slopes, 1e-10, (*NAMES[:3], *module.names))


def test_operator_keeps_its_contract():
    """Schema, fake tensors and autograd registration, as torch checks them."""
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=6, d=2))
    _, sizes, named = operator.flatten_hierarchy(Hierarchy.from_parents(hsa.random_parents(6, 1)))
    names, parts = zip(*named)
    text = operator.BREAK.join(["both", *names])
    torch.library.opcheck(operator.hsa, ([q, k, v, *parts], text, sizes, [6, 1, 0], 0.5))
    torch.library.opcheck(operator.hsa, ([q, k, v], "both", [2, 4], [6, 0, 0], 0.5))


def test_windows_compile_into_one_graph_for_any_length():
    torch._dynamo.reset()

    def run(q, k, v):
        return hierarchical_attention(q, k, v, enable_gqa=True, hierarchy=(4, 16), tying="both")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (9, 40):
        inputs = [
            t.requires_grad_()
            for t in qkv(batch=2, heads=4, kv_heads=2, lq=length, d=4, dtype=torch.float32)
        ]
        eager, out = run(*inputs), compiled(*inputs)
        assert_close(out, eager, 1e-6, f"output at {length}")
        grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (out, eager)]
        assert_gradients(*grads, 1e-5, NAMES)


def test_trees_and_embeddings_compile_into_one_graph():
    torch._dynamo.reset()
    parents, kinds, names = kinds_tree()
    hierarchy = Hierarchy.from_parents(parents, kinds=kinds, kind_names=names)
    module = SiblingEmbeddings({"words": 4, "patches": 4, "parts": 3}, 4, 3, std=0.5)
    q, k, v = qkv(batch=2, heads=4, lq=10, d=4, dtype=torch.float32)
    bias = tensor(1, 1, 10, 10, seed=3, dtype=torch.float32)

    def run(q, k, v, bias):
        return attend_both_with_root(
            q, k, v, hierarchy, siblings=module, position_bias=bias, keep_diagonal=False
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v, bias), run(q, k, v, bias), strict=True):
        assert_close(a, b, 1e-6, "output and rho")


def test_key_tying_of_a_tree_compiles_into_one_graph():
    """A Hierarchy comes apart for the operator as group ids do, under a mask too."""
    torch._dynamo.reset()
    hierarchy = Hierarchy.from_parents(hsa.random_parents(10, 2))
    inputs = [
        t.requires_grad_()
        for t in qkv(batch=2, heads=4, kv_heads=2, lq=10, d=4, dtype=torch.float32)
    ]
    mask = torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) > 0.3

    def run(q, k, v):
        rule = dict(tying="key", near=1, refine_top_k=1, enable_gqa=True)
        return hierarchical_attention(
            q, k, v, mask | torch.eye(10, dtype=torch.bool), hierarchy=hierarchy, **rule
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, out = run(*inputs), compiled(*inputs)
    assert_close(out, eager, 1e-6, "output")
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (out, eager)]
    assert_gradients(*grads, 1e-5, NAMES)
