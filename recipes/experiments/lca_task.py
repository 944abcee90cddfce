"""The task of the depth experiment: two paths of a tree, partly named; how deep is their lowest common ancestor?"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

CLS, SEP = 0, 1
SPECIAL = 2


class LcaTask:
    """Pairs of leaves of one tree, of which the training never shows the held-out ones.

    A pair becomes `[CLS] path a [SEP] path b`. A path is named by its leaf and by `named` of the nodes above it,
    drawn afresh every time, in order from the root down; what is not named has to be known from what was learned of
    the tree. The label is the number of nodes that the two whole paths share. Labels are equally frequent, in
    training and in the test.

    Args:
        paths: of equal length, the root left out.
        named: nodes named above a leaf, fewer than there are.
        held_out: one pair in this many is kept for the test.
    """

    def __init__(self, paths: list[tuple[str, ...]], named: int, held_out: int = 5):
        self.depth, self.named = len(paths[0]), named
        names = sorted({name for path in paths for name in path})
        number = {name: SPECIAL + i for i, name in enumerate(names)}
        self.vocabulary, self.length = SPECIAL + len(names), 2 * (2 + named)
        self.paths = np.array([[number[name] for name in path] for path in paths])
        first, second = np.triu_indices(len(paths), 1)
        shared = (self.paths[first] == self.paths[second]).cumprod(1).sum(1)
        test = np.array([is_held_out(int(a), int(b), held_out) for a, b in zip(first, second)])
        pairs = np.stack([first, second], 1)
        self.train = [pairs[(shared == label) & ~test] for label in range(self.depth)]
        self.test = [pairs[(shared == label) & test] for label in range(self.depth)]
        if min(map(len, self.train + self.test)) == 0:
            raise ValueError(
                f"{len(paths)} leaves leave a depth without pairs; allowed: more leaves"
            )

    def batch(
        self, size: int, draw: np.random.Generator, test: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Random pairs: token ids [size, length] and labels [size], int64."""
        labels = draw.integers(self.depth, size=size)
        kinds = self.test if test else self.train
        pairs = np.stack([kinds[label][draw.integers(len(kinds[label]))] for label in labels])
        pairs = np.where(draw.random((size, 1)) < 0.5, pairs, pairs[:, ::-1])
        sides = [self.side(pairs[:, 0], CLS, draw), self.side(pairs[:, 1], SEP, draw)]
        return torch.from_numpy(np.concatenate(sides, 1)), torch.from_numpy(labels)

    def side(self, leaves: np.ndarray, lead: int, draw: np.random.Generator) -> np.ndarray:
        """A leading token and one path as it is named, [size, named + 2]."""
        above = draw.random((len(leaves), self.depth - 1)).argsort(1)[:, : self.named]
        leaf = np.full((len(leaves), 1), self.depth - 1)
        chosen = np.concatenate([np.sort(above, 1), leaf], 1)
        return np.concatenate(
            [np.full_like(leaf, lead), np.take_along_axis(self.paths[leaves], chosen, 1)], 1
        )

    def by_names_alone(self, tokens: Tensor) -> Tensor:
        """The answer of a rule that knows every node's depth and nothing else of the tree: the deepest node that
        both paths name. Shapes as in `batch`.
        """
        depth = np.zeros(self.vocabulary, dtype=np.int64)
        depth[self.paths] = np.arange(1, self.depth + 1)
        first, second = tokens.numpy().reshape(len(tokens), 2, -1)[:, :, 1:].transpose(1, 0, 2)
        common = (first[:, :, None] == second[:, None, :]).any(2)
        return torch.from_numpy((depth[first] * common).max(1))


def is_held_out(a: int, b: int, one_in: int) -> bool:
    """A choice that depends on the pair alone, so that no run ever trains on a test pair."""
    return zlib.crc32(f"{a},{b}".encode()) % one_in == 0
