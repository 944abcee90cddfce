"""tying="both" on long sequences and deep trees: precision, underflow, cost, memory, and dtypes."""

import random

import pytest
import torch

from hf_hyperattn.analysis import PeakMemory
from hf_hyperattn.hierarchy import Hierarchy, Tree
from hf_hyperattn.mechanisms.hsa.reference import definition_both
from hf_hyperattn.mechanisms.hsa.tree.both import attend_both, attend_both_with_root
from hf_hyperattn.mechanisms.hsa.tree.layout import layout_of
from tests.oracles.cases import assert_close, qkv, tensor

LENGTH = 4096


def binary_tree(shuffled):
    """Twelve levels over 4,096 tokens; shuffled: neighbours in the tree are no neighbours in the sequence."""
    parents, level, count = [], list(range(LENGTH)), LENGTH
    if shuffled:
        random.Random(0).shuffle(level)
    parent = {}
    while len(level) > 1:
        for i, node in enumerate(level):
            parent[node] = count + i // 2
        level = list(range(count, count + len(level) // 2))
        count += len(level)
    parents = [parent.get(node, -1) for node in range(count)]
    return Hierarchy.from_parents(parents)


HIERARCHIES = {
    "windows": lambda: Hierarchy.windows(LENGTH, [2**k for k in range(1, 12)]),
    "tree": lambda: binary_tree(False),
    "scattered": lambda: binary_tree(True),
}


@pytest.mark.parametrize("kind", HIERARCHIES)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_float32_at_depth_twelve(kind, scale):
    """Output and ρ within 2e-4 of float64, gradients likewise; logits up to 20 at the larger scale."""
    hierarchy = HIERARCHIES[kind]()
    assert int(hierarchy.tree().depth.max()) == 12
    exact = [
        t.requires_grad_()
        for t in qkv(batch=1, heads=2, kv_heads=1, lq=LENGTH, d=8, seed=1, scale=scale)
    ]
    short = [t.detach().float().requires_grad_() for t in exact]
    wide = [t.detach().double().requires_grad_() for t in short]
    weight = tensor(1, 2, LENGTH, 8, seed=4)
    found = []
    for inputs in (short, wide):
        out, root = attend_both_with_root(*inputs, hierarchy)
        found.append(
            [
                out.detach(),
                root.detach(),
                *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs),
            ]
        )
    for name, a, b in zip(("output", "rho", "query", "key", "value"), *found, strict=True):
        assert_close(a, b, 2e-4 * max(1.0, float(b.abs().max()) if name != "output" else 1.0), name)


@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_long_products_of_inside_do_not_underflow(shift):
    """A tree as deep as the sequence is long, each step keeping e^-60 of the mass inside, or all but that."""
    n = 40
    tree = Tree.from_parents([n, n, *range(n + 1, 2 * n - 1), *range(n + 1, 2 * n - 1), -1])
    column = torch.zeros(1, 1, n)
    column[..., :2] = shift
    column[..., 2:] = torch.linspace(0, shift * -1, n - 2)
    q, v = torch.ones(1, 1, n, 1), torch.eye(n)[None, None]
    column.requires_grad_()
    out, root = attend_both_with_root(q, column[..., None], v, Hierarchy.of_trees([tree]), 1.0)
    S = column.detach()[:, :, None].expand(1, 1, n, n)
    P, rho = definition_both(S, tree)
    assert_close(out, P, 2e-4, "P")
    assert_close(root / rho, torch.ones(1, 1), 1e-6, "rho")
    (slope,) = torch.autograd.grad(out[..., 0].sum() + root.sum(), column)
    wide = column.detach().double().requires_grad_()
    P, rho = definition_both(wide[:, :, None].expand(1, 1, n, n), tree)
    (expected,) = torch.autograd.grad(P[..., 0].sum() + rho.sum(), wide)
    assert_close(slope, expected, 2e-4, "gradient")


def test_a_tree_as_deep_as_the_sequence_costs_no_square():
    """A thousand levels of two nodes: memory of the order of the nodes, forward and backward."""
    n = 1024
    tree = Tree.from_parents([n, n, *range(n + 1, 2 * n - 1), *range(n + 1, 2 * n - 1), -1])
    hierarchy = Hierarchy.of_trees([tree])
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    layout = layout_of(hierarchy, 1, q.device)
    assert sum(g.families * g.width for g in layout.groups) == 2 * (n - 1)
    with PeakMemory() as memory:
        attend_both(q, k, v, hierarchy).sum().backward()
    assert memory.added < 30 * 2**20
    with torch.no_grad():
        exact = attend_both(q.double(), k.double(), v.double(), hierarchy)
    assert_close(attend_both(q, k, v, hierarchy), exact, 2e-4, "output")


def test_memory_is_linear():
    """65,536 tokens, forward and backward: an N x N matrix would take 16 GiB."""
    n = 2**16
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    with PeakMemory() as memory:
        attend_both(
            q, k, v, Hierarchy.windows(n, (16, 64, 256, 1024, 4096, 16384))
        ).sum().backward()
    assert memory.added < 150 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=50, d=8, dtype=dtype))
    out = attend_both(q, k, v, Hierarchy.windows(50, (4, 16)))
    assert out.dtype == torch.float32
    exact = attend_both(q.double(), k.double(), v.double(), Hierarchy.windows(50, (4, 16)))
    assert_close(out, exact, 1e-5, "output")
    out.sum().backward()
    assert q.grad.dtype == dtype


def test_views_as_transformers_hands_them_over():
    """Heads and length exchanged in memory, and a length that no window divides."""
    q, k, v = (
        t.transpose(1, 2).contiguous().transpose(1, 2)
        for t in qkv(batch=2, heads=6, kv_heads=3, lq=37, d=4)
    )
    hierarchy = Hierarchy.windows(37, (4, 16))
    plain = attend_both(q.contiguous(), k.contiguous(), v.contiguous(), hierarchy)
    assert_close(attend_both(q, k, v, hierarchy), plain, 0, "output")
