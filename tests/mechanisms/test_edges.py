"""edge_attention: with all pairs it is dense attention; otherwise that under the mask of the edges."""

import pytest
import torch

from hf_hyperattn import functional

N, M, H, D = 7, 5, 2, 4
SCORES = {
    "dot product": (None, {}),
    "cone": (functional.cone_scores, {"gamma": torch.tensor([0.5, 1.0]), "mapping": "psi"}),
    "hyperbolic": (functional.hyperbolic_scores, {"curvature": 0.5}),
}


@pytest.fixture
def rows():
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, H, d, dtype=torch.float64, generator=draw)
        for n, d in ((N, D), (M, D), (M, 3))
    ]


def dense(query, key, value, scores, options, mask):
    """The definition with the logits of all pairs."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    logits = q @ k.mT / D**0.5 if scores is None else scores(q, k, **options)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    return (weights @ v)[0].transpose(0, 1)


@pytest.mark.parametrize("name", SCORES)
def test_it_is_attention_under_the_mask_of_the_edges(rows, name):
    mask = torch.rand(N, M, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[3] = False
    target, source = mask.nonzero().T
    scores, options = SCORES[name]
    leaves = [x.clone().requires_grad_() for x in rows]
    others = [x.clone().requires_grad_() for x in rows]
    found = functional.edge_attention(*leaves, torch.stack([source, target]), scores, **options)
    expected = dense(*others, scores, options, mask)
    torch.testing.assert_close(found, expected)
    assert not found[3].any()
    weigh = torch.randn(
        found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    (found * weigh).sum().backward()
    (expected * weigh)[mask.any(1)].sum().backward()
    for mine, other in zip(leaves, others):
        torch.testing.assert_close(mine.grad, other.grad)


def test_an_edge_that_is_there_twice_counts_twice(rows):
    edges = torch.tensor([[0, 0, 1], [2, 2, 2]])
    query, key, value = rows
    logits = (query[2] * key[[0, 0, 1]]).sum(-1) / D**0.5
    expected = (logits.softmax(0)[..., None] * value[[0, 0, 1]]).sum(0)
    torch.testing.assert_close(functional.edge_attention(*rows, edges)[2], expected)
    assert not functional.edge_attention(*rows, edges[:, :0]).any()


def test_extreme_logits_and_half_precision(rows):
    query, key, value = (1000 * rows[0], 1000 * rows[1], rows[2])
    edges = torch.cartesian_prod(torch.arange(M), torch.arange(N)).T
    assert functional.edge_attention(query, key, value, edges).isfinite().all()
    found = functional.edge_attention(*(x.bfloat16() for x in rows), edges)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.double(), functional.edge_attention(*rows, edges), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("name", SCORES)
def test_many_edges_of_a_node_are_summed_in_float32(name):
    """4,000 edges into one node, and as many out of one, whose gradients are added up."""
    draw = torch.Generator().manual_seed(3)
    rows = [
        torch.randn(n, H, d, generator=draw).bfloat16()
        for n, d in ((4001, D), (4001, D), (4001, 3))
    ]
    rows[2] += 1
    one, others = torch.zeros(4000, dtype=torch.long), torch.arange(1, 4001)
    edges = torch.stack([torch.cat([others, one, others]), torch.cat([one, others, others])])
    scores, options = SCORES[name]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in rows]
        output = functional.edge_attention(*leaves, edges, scores, **options)
        found.append(
            [output.detach(), *torch.autograd.grad(output.double().square().sum(), leaves)]
        )
    for mine, exact in zip(*found):
        assert mine.dtype == torch.bfloat16
        apart = (mine.double() - exact)[0].abs().max() / exact[0].abs().max()
        assert apart < 0.02, (
            apart
        )  # bfloat16 numbers lie up to 0.008 of themselves apart, float32's rounding aside


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"edges": torch.tensor([[0], [N]])},
            f"edges names node {N} of query; allowed: 0 to {N - 1}",
        ),
        (
            {"edges": torch.tensor([[M], [0]])},
            f"edges names node {M} of key; allowed: 0 to {M - 1}",
        ),
        (
            {"value": torch.zeros(M + 1, H, 3)},
            f"value has {M + 1} nodes, key has {M}; they must be equal",
        ),
        (
            {"key": torch.zeros(M, H)},
            r"key has shape \(5, 2\); allowed: 3 axes, \[nodes, heads, dim\]",
        ),
    ],
)
def test_refusals(rows, change, said):
    given = (
        dict(zip(("query", "key", "value"), rows)) | {"edges": torch.tensor([[0], [0]])} | change
    )
    with pytest.raises(ValueError, match=said):
        functional.edge_attention(**given)
