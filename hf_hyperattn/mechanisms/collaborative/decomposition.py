"""From the projections of heads to shared ones: a CP decomposition by alternating least squares, in float64.

The tensor has one matrix a head, T_h = W_Q^h^T W_K^h [D, D], and is never formed: each matrix is a product of rank d,
and all that alternating least squares asks of the tensor are its products with the factors, which cost O(H·d·D·R) a
step through the projections and O(H·D²·R) through the tensor. QR decompositions of the stacked projections bring D down
to at most H·d first. The start is the leading singular vectors of the tensor's two large unfoldings, or the leading
singular pairs of single heads, whichever is ahead after a few steps.

Least squares of T_h weighs all directions alike (the paper's way). With second moments C_Q, C_K of what the projections
read, it is done on C_Q^½ T_h C_K^½ instead: the sum of squares of what logits then are off by, over pairs of
independent inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A step that lowers the error by less than this share of it is the last one.
TOLERANCE = 1e-5
#: Steps that each start is tried for.
TRIAL = 10
#: What is added to the diagonal of the normal equations, as a share of it.
RIDGE = 1e-10
#: The same for second moments: directions that were not seen count a little too.
UNSEEN = 1e-2


@dataclass(frozen=True)
class Decomposition:
    """Σ_r mixing[h, r] · query[r] ⊗ key[r] ≈ T_h.

    Args:
        mixing: [H, R], query: [R, D], key: [R, D'], float64.
        error: Frobenius norm of what is left over that of the tensor.
        logit_error: the same of the weighted tensor; None where nothing was weighted.
        steps: of alternating least squares that were taken.
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
    """The shared projections that stand for those of H heads.

    Args:
        query, key: weights of the heads, [H, d, D] and [H, d, D'].
        rank: of the decomposition, at most H·d, at which it is exact: the projections as they are.
        steps: most steps.
        seed: of the random part of the start.
        moments: of what queries and keys are made from, [D, D] and [D', D']; None weighs all directions alike.

    Raises:
        ValueError: weights or moments that are not finite.
    """
    query, key = query.double(), key.double()
    for name, tensors in (
        ("weights of queries or keys", (query, key)),
        ("hidden states", moments or ()),
    ):
        if not all(bool(t.isfinite().all()) for t in tensors):
            raise ValueError(f"the {name} are not finite; allowed: finite ones")
    heads, d, _ = query.shape
    if rank == heads * d:
        mixing = torch.eye(heads, dtype=torch.float64).repeat_interleave(d, 1)
        exact = None if moments is None else 0.0
        return Decomposition(mixing, query.flatten(0, 1), key.flatten(0, 1), 0.0, exact, 0)
    roots = (None, None) if moments is None else tuple(_root(m.double()) for m in moments)
    (basis_q, left), (basis_k, right) = (
        _reduced(w if r is None else w @ r) for w, r in zip((query, key), roots)
    )
    (mixing, a, b), error, taken = _solved(_Problem(left, right), rank, steps, seed)
    a, b = basis_q @ a, basis_k @ b
    if moments is None:
        return Decomposition(mixing, a.T, b.T, error, None, taken)
    a, b = (torch.linalg.solve(root, f) for root, f in zip(roots, (a, b)))
    plain = _Problem(query.mT, key.mT).error(mixing, a, b)
    return Decomposition(mixing, a.T, b.T, plain, error, taken)


def _root(moment: Tensor) -> Tensor:
    """The symmetric square root of a second moment and a little of the identity."""
    size = moment.diagonal().mean().clamp_min(1e-150)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * (values.clamp_min(0) + UNSEEN * size).sqrt()) @ vectors.mT


def _reduced(weights: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis [D, p] of what all heads read, and the heads' weights in it, [H, p, d]."""
    heads, d, width = weights.shape
    basis, core = torch.linalg.qr(weights.reshape(heads * d, width).T)
    return basis, core.unflatten(1, (heads, d)).transpose(0, 1)


class _Problem:
    """The tensor T_h = A_h B_h^T, known by A [H, p, d] and B [H, p', d]."""

    def __init__(self, a: Tensor, b: Tensor):
        self.a, self.b = a, b
        self.square = ((a.mT @ a) * (b.mT @ b)).sum()

    def step(self, mixing: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each factor in turn as the least-squares solution for the two others; then balanced."""
        through_b = self.b.mT @ b  # [H, d, R]
        a = _least_squares(
            (mixing.T @ mixing) * (b.T @ b), (self.a @ (through_b * mixing[:, None])).sum(0)
        )
        through_a = self.a.mT @ a
        b = _least_squares(
            (mixing.T @ mixing) * (a.T @ a), (self.b @ (through_a * mixing[:, None])).sum(0)
        )
        mixing = _least_squares((a.T @ a) * (b.T @ b), (through_a * (self.b.mT @ b)).sum(1))
        norms = [f.norm(dim=0).clamp_min(1e-150) for f in (mixing, a, b)]
        each = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
        return mixing * (each / norms[0]), a * (each / norms[1]), b * (each / norms[2])

    def error(self, mixing: Tensor, a: Tensor, b: Tensor) -> float:
        """Norm of the residual over that of the tensor; 0 for a tensor of zeros."""
        inner = (((self.a.mT @ a) * (self.b.mT @ b)).sum(1) * mixing).sum()
        square = ((mixing.T @ mixing) * (a.T @ a) * (b.T @ b)).sum()
        left = (self.square - 2 * inner + square).clamp_min(0)
        return float((left / self.square).sqrt()) if self.square > 0 else 0.0

    def unfolded(self, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Leading singular vectors of the two large unfoldings, random mixing."""
        through = lambda x, y: torch.linalg.eigh((x @ (y.mT @ y) @ x.mT).sum(0))[1].flip(1)
        sides = [through(self.a, self.b), through(self.b, self.a)]
        random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
        a, b = (
            torch.cat([s[:, :rank], random(len(s), max(0, rank - s.shape[1]))], 1) for s in sides
        )
        return random(len(self.a), rank), a, b

    def by_head(self, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The leading singular pairs of single heads, each mixed into its own."""
        (qa, ra), (qb, rb) = torch.linalg.qr(self.a), torch.linalg.qr(self.b)
        u, s, vh = torch.linalg.svd(ra @ rb.mT)
        best = s.flatten().argsort(descending=True)[:rank]
        owner, roots = best // s.shape[1], s.flatten()[best].sqrt()
        a, b = (x.transpose(1, 2).flatten(0, 1)[best].T * roots for x in (qa @ u, qb @ vh.mT))
        mixing = torch.nn.functional.one_hot(owner, len(self.a)).T.double()
        if len(best) < rank:
            extra = self.unfolded(rank - len(best), generator)
            mixing, a, b = (torch.cat([x, y], 1) for x, y in zip((mixing, a, b), extra))
        return mixing, a, b


def _solved(
    problem: _Problem, rank: int, steps: int, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], float, int]:
    """The factors, their error, and the steps taken: from the better start until steps bring nothing more."""
    generator = torch.Generator().manual_seed(seed)
    starts, trial = [], min(TRIAL, steps)
    for start in (problem.unfolded, problem.by_head):
        factors = start(rank, generator)
        for _ in range(trial):
            factors = problem.step(*factors)
        starts.append((problem.error(*factors), factors))
    error, factors = min(starts, key=lambda s: s[0])
    for taken in range(trial, steps):
        factors = problem.step(*factors)
        before, error = error, problem.error(*factors)
        if before - error <= TOLERANCE * before:
            return factors, error, taken + 1
    return factors, error, steps


def _least_squares(gram: Tensor, right: Tensor) -> Tensor:
    """right · gram⁻¹, with a little on the diagonal where components are alike."""
    ridge = RIDGE * gram.diagonal().mean().clamp_min(1e-150)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + ridge * eye)
    if int(info):
        return torch.linalg.lstsq(gram, right.mT, driver="gelsd").solution.mT
    return torch.cholesky_solve(right.mT, factor).mT
