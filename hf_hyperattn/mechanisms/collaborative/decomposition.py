"""Replace the projections of heads by shared ones: a CP decomposition in float64.

The tensor has one matrix per head, T_h = W_Q^h^T W_K^h [D, D]. It is never formed: each matrix is a
product of rank d, and alternating least squares (ALS) needs only the tensor's products with the
factors. These cost O(H·d·D·R) per step through the projections, instead of O(H·D²·R) through the
tensor.

QR decompositions of the stacked projections first reduce D to at most H·d. ALS has two starts:
leading singular vectors of the tensor's two large unfoldings, and leading singular pairs of single
heads. The better one after a few steps is continued.

Least squares of T_h weight all directions equally, as in the paper. With second moments C_Q and C_K
of the projections' inputs, ALS approximates C_Q^½ T_h C_K^½ instead. The error is then the squared
error of the logits, summed over pairs of independent inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: ALS stops after a step that reduces the error by less than this share.
TOLERANCE = 1e-5
#: Number of steps to compare the two starts.
TRIAL = 10
#: Ridge on the diagonal of the normal equations, relative to its mean.
RIDGE = 1e-10
#: Ridge of the second moments, relative to their mean: unseen directions get a small weight.
UNSEEN = 1e-2


@dataclass(frozen=True)
class Decomposition:
    """The factors of Σ_r mixing[h, r] · query[r] ⊗ key[r] ≈ T_h.

    Args:
        mixing: Shape [H, R], float64.
        query: Shape [R, D], float64.
        key: Shape [R, D'], float64.
        error: Frobenius norm of the residual, relative to the tensor's.
        logit_error: The same for the weighted tensor; None without moments.
        steps: Number of ALS steps.
    """

    mixing: Tensor
    query: Tensor
    key: Tensor
    error: float
    logit_error: float | None
    steps: int


def decompose(
    query: Tensor,
    key: Tensor,
    rank: int,
    steps: int = 100,
    seed: int = 0,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Decomposition:
    """Compute shared projections that replace the projections of H heads.

    Args:
        query: Query weights of the heads, shape [H, d, D].
        key: Key weights of the heads, shape [H, d, D'].
        rank: Rank of the decomposition, at most H·d, where it is exact: the projections themselves.
        steps: Largest number of ALS steps.
        seed: Seed of the random part of the start.
        moments: Second moments of the inputs of queries and keys, [D, D] and [D', D']; None weights
            all directions equally.

    Raises:
        ValueError: Weights or moments are not finite.
    """
    # ALS is ill-conditioned: its normal equations square the condition number.
    query, key = query.double(), key.double()
    for name, tensors in (
        ("weights of queries or keys", (query, key)),
        ("hidden states", moments or ()),
    ):
        if not all(bool(t.isfinite().all()) for t in tensors):
            raise ValueError(f"the {name} are not finite; allowed: finite ones")
    heads, d, _ = query.shape
    # At full rank, every head reads its own block of the concatenated projections.
    if rank == heads * d:
        mixing = torch.eye(heads, dtype=torch.float64).repeat_interleave(d, 1)
        exact = None if moments is None else 0.0
        return Decomposition(
            mixing=mixing,
            query=query.flatten(0, 1),
            key=key.flatten(0, 1),
            error=0.0,
            logit_error=exact,
            steps=0,
        )
    roots = (None, None) if moments is None else tuple(_square_root(m.double()) for m in moments)
    # Reduce the width of the tensor to the span of the projections.
    basis_q, left = _reduce_width(query if roots[0] is None else query @ roots[0])
    basis_k, right = _reduce_width(key if roots[1] is None else key @ roots[1])
    (mixing, a, b), error, taken = _run_als(_Problem(left, right), rank, steps, seed)
    a, b = basis_q @ a, basis_k @ b
    if moments is None:
        return Decomposition(
            mixing=mixing, query=a.T, key=b.T, error=error, logit_error=None, steps=taken
        )
    # Undo the weighting: the factors approximate C_Q^½ T_h C_K^½, but T_h is wanted.
    a, b = (torch.linalg.solve(root, factor) for root, factor in zip(roots, (a, b)))
    plain_error = _Problem(query.mT, key.mT).relative_error(mixing, a, b)
    return Decomposition(
        mixing=mixing, query=a.T, key=b.T, error=plain_error, logit_error=error, steps=taken
    )


def _square_root(moment: Tensor) -> Tensor:
    """Return the symmetric square root of a second moment plus a small ridge."""
    # The limit avoids a division by zero for inputs that are all zero.
    size = moment.diagonal().mean().clamp_min(1e-150)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * (values.clamp_min(0) + UNSEEN * size).sqrt()) @ vectors.mT


def _reduce_width(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis of all weights, and the weights in this basis.

    Args:
        weights: Shape [H, d, D].

    Returns:
        The basis [D, p], and the weights [H, p, d].
    """
    heads, d, width = weights.shape
    # All heads together span at most H·d directions of the D inputs.
    basis, core = torch.linalg.qr(weights.reshape(heads * d, width).T)
    return basis, core.unflatten(1, (heads, d)).transpose(0, 1)


class _Problem:
    """The tensor T_h = A_h B_h^T, given by A [H, p, d] and B [H, p', d]."""

    def __init__(self, a: Tensor, b: Tensor):
        self.a, self.b = a, b
        # |T|² through the d x d products, without forming T_h.
        self.square = ((a.mT @ a) * (b.mT @ b)).sum()

    def improve_factors(
        self, mixing: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Solve for each factor with the two others fixed, then balance their norms."""
        # The Gram matrix of a CP problem is the elementwise product of the factors' Gram matrices.
        through_b = self.b.mT @ b  # [H, d, R]
        right = (self.a @ (through_b * mixing[:, None])).sum(0)
        a = _least_squares((mixing.T @ mixing) * (b.T @ b), right)
        through_a = self.a.mT @ a
        right = (self.b @ (through_a * mixing[:, None])).sum(0)
        b = _least_squares((mixing.T @ mixing) * (a.T @ a), right)
        mixing = _least_squares((a.T @ a) * (b.T @ b), (through_a * (self.b.mT @ b)).sum(1))
        # Equal norms keep the next normal equations well conditioned.
        norms = [f.norm(dim=0).clamp_min(1e-150) for f in (mixing, a, b)]
        each = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
        return mixing * (each / norms[0]), a * (each / norms[1]), b * (each / norms[2])

    def relative_error(self, mixing: Tensor, a: Tensor, b: Tensor) -> float:
        """Return the norm of the residual relative to the tensor's; 0 for a zero tensor."""
        # |T - X|² = |T|² - 2 <T, X> + |X|², without forming T or X.
        inner = (((self.a.mT @ a) * (self.b.mT @ b)).sum(1) * mixing).sum()
        square = ((mixing.T @ mixing) * (a.T @ a) * (b.T @ b)).sum()
        left = (self.square - 2 * inner + square).clamp_min(0)
        return float((left / self.square).sqrt()) if self.square > 0 else 0.0

    def start_from_unfoldings(
        self, rank: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start from singular vectors of the two large unfoldings, with random mixing."""
        # Singular vectors of an unfolding are eigenvectors of its Gram matrix, largest first.
        singular_vectors = lambda x, y: torch.linalg.eigh((x @ (y.mT @ y) @ x.mT).sum(0))[1].flip(1)
        sides = [singular_vectors(self.a, self.b), singular_vectors(self.b, self.a)]
        random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
        a, b = (
            torch.cat([s[:, :rank], random(len(s), max(0, rank - s.shape[1]))], 1) for s in sides
        )
        return random(len(self.a), rank), a, b

    def start_from_heads(
        self, rank: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start from the leading singular pairs of single heads, each mixed into its head."""
        (qa, ra), (qb, rb) = torch.linalg.qr(self.a), torch.linalg.qr(self.b)
        # The SVD of A B^T follows from the SVD of the small R_A R_B^T.
        u, s, vh = torch.linalg.svd(ra @ rb.mT)
        # Take the largest singular values of all heads, whichever head they belong to.
        best = s.flatten().argsort(descending=True)[:rank]
        owner, roots = best // s.shape[1], s.flatten()[best].sqrt()
        a, b = (x.transpose(1, 2).flatten(0, 1)[best].T * roots for x in (qa @ u, qb @ vh.mT))
        mixing = torch.nn.functional.one_hot(owner, len(self.a)).T.double()
        # Fewer pairs than the rank: fill up with columns of the other start.
        if len(best) < rank:
            extra = self.start_from_unfoldings(rank - len(best), generator)
            mixing, a, b = (torch.cat([x, y], 1) for x, y in zip((mixing, a, b), extra))
        return mixing, a, b


def _run_als(
    problem: _Problem, rank: int, steps: int, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], float, int]:
    """Run ALS from the better of two starts, until steps bring nothing more.

    Returns:
        The factors, their error, and the number of steps.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = []
    trial = min(TRIAL, steps)
    # Neither start is always better, so try both for a few steps.
    for start in (problem.start_from_unfoldings, problem.start_from_heads):
        factors = start(rank, generator)
        for _ in range(trial):
            factors = problem.improve_factors(*factors)
        starts.append((problem.relative_error(*factors), factors))
    error, factors = min(starts, key=lambda s: s[0])
    for taken in range(trial, steps):
        factors = problem.improve_factors(*factors)
        before, error = error, problem.relative_error(*factors)
        # ALS never increases the error, so a small decrease means convergence.
        if before - error <= TOLERANCE * before:
            return factors, error, taken + 1
    return factors, error, steps


def _least_squares(gram: Tensor, right: Tensor) -> Tensor:
    """Return right · gram⁻¹, with a ridge for components that are nearly equal."""
    ridge = RIDGE * gram.diagonal().mean().clamp_min(1e-150)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + ridge * eye)
    # Cholesky fails on a singular matrix; `gelsd` then gives the solution of least norm.
    if int(info):
        return torch.linalg.lstsq(gram, right.mT, driver="gelsd").solution.mT
    return torch.cholesky_solve(right.mT, factor).mT
