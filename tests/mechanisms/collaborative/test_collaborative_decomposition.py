"""The CP decomposition against the dense tensor, against tensorly, and on tensors that are hard for it."""

import pytest
import torch

from hf_hyperattn.mechanisms.collaborative.decomposition import decompose


def weights(heads=4, d=3, width=10, width_key=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (heads, d)
    return [
        torch.randn(*shape, w, generator=generator, dtype=torch.float64)
        for w in (width, width_key or width)
    ]


def tensor(query, key):
    return torch.einsum("hdi,hdj->hij", query.double(), key.double())


def rebuilt(found):
    return torch.einsum("hr,ri,rj->hij", found.mixing, found.query, found.key)


def relative(query, key, found, roots=None):
    """The error from the dense tensors."""
    whole, approximated = tensor(query, key), rebuilt(found)
    if roots is not None:
        whole, approximated = (roots[0] @ t @ roots[1] for t in (whole, approximated))
    return ((whole - approximated).norm() / whole.norm()).item()


@pytest.mark.parametrize("widths", [(10, 10), (20, 20), (7, 7), (9, 14)], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 11])
def test_the_error_is_that_of_the_dense_tensor(widths, rank):
    query, key = weights(width=widths[0], width_key=widths[1])
    found = decompose(query, key, rank, steps=30)
    assert found.query.shape == (rank, widths[0]) and found.key.shape == (rank, widths[1])
    assert abs(found.error - relative(query, key, found)) < 1e-9
    assert found.logit_error is None and found.steps <= 30


def test_full_rank_is_exact_and_keeps_the_weights():
    query, key = weights()
    found = decompose(query, key, 12)
    assert found.error == 0.0 and found.steps == 0
    assert torch.equal(found.query, query.flatten(0, 1)) and torch.equal(
        found.key, key.flatten(0, 1)
    )
    torch.testing.assert_close(rebuilt(found), tensor(query, key), atol=1e-13, rtol=1e-12)


def test_a_tensor_of_low_rank_is_found_again():
    generator = torch.Generator().manual_seed(1)
    mixing, a, b = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((4, 5), (5, 8), (5, 8))
    )
    # heads of dimension 5 that already share: W_Q^h = diag(m_h) a, W_K^h = b
    query, key = mixing[..., None] * a, b.expand(4, -1, -1)
    assert decompose(query, key, 5, steps=400).error < 1e-5
    assert decompose(query, key, 4, steps=400).error > 1e-2


@pytest.mark.parametrize("rank", [2, 6, 9])
def test_as_good_as_tensorly(rank):
    tl = pytest.importorskip("tensorly")
    from tensorly.decomposition import parafac

    query, key = weights(heads=5, d=2, width=9)
    dense = tensor(query, key).numpy()
    tl.set_backend("numpy")
    theirs = min(
        tl.norm(
            dense
            - tl.cp_to_tensor(
                parafac(dense, rank, n_iter_max=300, init="random", random_state=s, tol=1e-10)
            )
        )
        / tl.norm(dense)
        for s in range(2)
    )
    ours = min(decompose(query, key, rank, steps=300, seed=s).error for s in range(2))
    assert ours <= theirs * 1.05 + 1e-6


def test_more_rank_and_more_steps_are_never_worse():
    query, key = weights(heads=6, d=4, width=16)
    errors = [decompose(query, key, rank, steps=60).error for rank in (1, 4, 8, 16, 23, 24)]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0.0
    steps = [decompose(query, key, 8, steps=n).error for n in (0, 1, 5, 20, 80)]
    assert all(later <= before + 1e-12 for before, later in zip(steps[2:], steps[3:]))


def test_the_seed_decides():
    query, key = weights()
    one, same, other = (decompose(query, key, 5, seed=s) for s in (3, 3, 4))
    assert torch.equal(one.query, same.query) and torch.equal(one.mixing, same.mixing)
    assert not torch.equal(one.query, other.query) or one.error == other.error


def test_float32_weights_are_decomposed_in_float64():
    query, key = weights()
    found = decompose(query.float(), key.float(), 5)
    assert found.query.dtype == found.mixing.dtype == torch.float64


def moments(width, seed=5, rank=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rank or 4 * width, width, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, -2, width, dtype=torch.float64)
    return x.mT @ x / len(x)


def root(moment):
    values, vectors = torch.linalg.eigh(
        moment + 1e-2 * moment.diagonal().mean() * torch.eye(len(moment))
    )
    return vectors @ torch.diag(values.sqrt()) @ vectors.mT


def test_moments_weigh_the_directions_that_are_seen():
    query, key = weights(heads=6, d=4, width=16)
    seen = moments(16), moments(16, seed=6)
    plain, fitted = (decompose(query, key, 8, moments=m) for m in (None, seen))
    roots = [root(m) for m in seen]
    assert abs(fitted.error - relative(query, key, fitted)) < 1e-9
    assert abs(fitted.logit_error - relative(query, key, fitted, roots)) < 1e-9
    assert (
        fitted.logit_error < 0.8 * relative(query, key, plain, roots) and fitted.error > plain.error
    )


def test_moments_of_few_inputs_are_no_trouble():
    query, key = weights(heads=6, d=4, width=16)
    found = decompose(query, key, 8, moments=(moments(16, rank=2), moments(16, rank=1)))
    assert found.query.isfinite().all() and found.logit_error < 1


def hard():
    query, key = weights()
    same = query[:1].expand(4, -1, -1), key[:1].expand(4, -1, -1)
    silent = query.clone()
    silent[1:3] = 0
    thin = query.clone()
    thin[..., 1:] = 0
    return {
        "zeros": (torch.zeros_like(query), key),
        "all heads alike": same,
        "silent heads": (silent, key),
        "one input read": (thin, key),
        "tiny": (query * 1e-12, key * 1e-12),
        "huge": (query * 1e12, key * 1e12),
        "far apart": (query * torch.logspace(-6, 6, 4, dtype=torch.float64)[:, None, None], key),
    }


@pytest.mark.parametrize("rank", [1, 4, 11])
@pytest.mark.parametrize("name", hard())
def test_hard_tensors(name, rank):
    query, key = hard()[name]
    found = decompose(query, key, rank, steps=60)
    assert all(t.isfinite().all() for t in (found.mixing, found.query, found.key))
    assert 0 <= found.error <= 1 + 1e-9
    if name == "all heads alike" and rank >= 3:
        assert found.error < 1e-3  # d components are all there is
    if name not in ("zeros",):
        assert abs(found.error - relative(query, key, found)) < 1e-6


def test_weights_that_are_not_finite_are_refused():
    query, key = weights()
    query[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        decompose(query, key, 3)
    with pytest.raises(ValueError, match="hidden states are not finite"):
        decompose(key, key, 3, moments=(torch.full((10, 10), float("inf")), torch.eye(10)))
