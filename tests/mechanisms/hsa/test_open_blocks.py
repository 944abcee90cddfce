"""Which blocks are open by where they stand, against the distance as it is defined, token by token."""

import itertools

import pytest
import torch

from hf_hyperattn.mechanisms.hsa.open_blocks import first_near, is_open


def definition(block: range, own: range, near: int, sinks: int) -> bool:
    distance = min(abs(i - j) for i, j in itertools.product(block, own))
    return min(block) < sinks or distance < near or bool(set(block) & set(own))


@pytest.mark.parametrize("near", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_numbers_and_tensors(near, sinks):
    own = range(8, 12)
    blocks = [range(start, start + size) for size in (1, 2, 4) for start in range(0, 24, size)]
    expected = [definition(block, own, near, sinks) for block in blocks]
    first, last = torch.tensor([[b.start, b.stop - 1] for b in blocks]).T
    found = is_open(first, own.start - last, first - (own.stop - 1), torch.tensor(near), sinks)
    assert found.tolist() == expected
    before = [
        (block, is_there) for block, is_there in zip(blocks, expected) if block.stop <= own.start
    ]
    for block, is_there in before:
        one = is_open(
            block.start, own.start - (block.stop - 1), block.start - (own.stop - 1), near, sinks
        )
        assert (
            one
            == is_there
            == (block.start < sinks or block.stop - 1 >= first_near(own.start, near))
        )
