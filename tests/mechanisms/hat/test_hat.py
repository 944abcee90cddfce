"""Layouts and segments of HAT, and its config, against the published table and against loops."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.hat.config import LAYOUTS, PUBLISHED, count_cross_blocks
from hf_hyperattn.mechanisms.hat.segments import count_segments, split_batch
from tests.oracles.hat import cut


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_are_made_as_published(name):
    groups = PUBLISHED[name].split(" ")
    assert count_cross_blocks(name, len(groups)) == tuple(group.count("C") for group in groups)


#: Written out by hand from the rules, for the depths of MiniLM and of BERT-base.
STRETCHED = {
    "I1": ("SC SC SC SC SC SC", "SC SC SC SC SC SC SC SC SC SC SC SC"),
    "I2": ("S SCC S SCC S SCC", "S SCC S SCC S SCC S SCC S SCC S SCC"),
    "I3": ("S SC S SC S SC", "S SC S SC S SC S SC S SC S SC"),
    "LC1": ("S S S S SC SC", "S S S S S S S S SC SC SC SC"),
    "LC2": ("S S S SCC S SCC", "S S S S S S S SCC S SCC S SCC"),
    "EC1": ("S S SCC S SCC S", "S S S SCC S SCC S SCC S S S S"),
    "EC2": ("S SC SC S S S", "S S S SC SC SC SC S S S S S"),
    "AH": ("S S S S S SCCC", "S S S S S S S S S S S SCCCC"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_for_other_depths(name):
    for blocks, pattern in zip((6, 12), STRETCHED[name]):
        assert count_cross_blocks(name, blocks) == count_cross_blocks(pattern, blocks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_depth_has_every_layout(name):
    for blocks in range(1, 49):
        found = count_cross_blocks(name, blocks)
        assert len(found) == blocks and 0 < sum(found) <= blocks + 1 and max(found) <= 4
        assert name.startswith("E") or found[-1] > 0


def test_patterns():
    assert count_cross_blocks("S SC SCCC", 3) == (0, 1, 3)
    with pytest.raises(
        ValueError, match="has 3 groups; allowed: one for each of the 4 segment-wise blocks"
    ):
        count_cross_blocks("S SC SC", 4)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"segment_length": 0},
            r"HatConfig.segment_length=0 is not allowed; allowed: numbers from 2",
        ),
        ({"segment_length": 1}, r"segment_length=1 is not allowed; allowed: numbers from 2"),
        ({"segment_length": 2.5}, r"segment_length=2.5 is not allowed; allowed: int"),
        (
            {"layout": "I4"},
            r"HatConfig.layout='I4' is not allowed; allowed: I1, I2, .*, or a pattern",
        ),
        ({"layout": "SS C"}, r"HatConfig.layout='SS C' is not allowed"),
        ({"layout": ""}, r"HatConfig.layout='' is not allowed"),
        ({"max_length": 0}, r"max_length=0 is not allowed; allowed: numbers from 1"),
        ({"cross_blocks": "zero"}, r"cross_blocks='zero' is not allowed; allowed: 'copy', 'new'"),
        ({"pooling": "cls"}, r"pooling='cls' is not allowed; allowed: 'max', 'mean', 'tokens'"),
        ({"cls_token_id": -1}, r"cls_token_id=-1 is not allowed; allowed: numbers from 0"),
        ({"gated": 1}, r"gated=1 is not allowed; allowed: bool"),
    ],
)
def test_configs_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        ha.HatConfig(**settings)


def test_the_config_is_plain_json():
    config = ha.HatConfig(segment_length=64, layout="S SC", gated=True)
    assert ha.MechanismConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "tokens, length", [(1, 2), (2, 2), (128, 128), (129, 128), (255, 128), (256, 128), (8192, 128)]
)
def test_number_of_segments(tokens, length):
    assert count_segments(tokens, length) == len(cut(list(range(tokens)), length))


def batch_of(lengths, width, seed=0):
    """A mask [B, N] with so many tokens in each row, padding anywhere."""
    draw = torch.Generator().manual_seed(seed)
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in zip(real, lengths):
        row[torch.randperm(width, generator=draw)[:n]] = True
    return real


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("length", [2, 3, 5, 30])
@pytest.mark.parametrize("lengths", [[1], [7, 1, 4], [13, 13], [2, 12, 5, 6]])
def test_segments_hold_what_the_definition_says(packed, length, lengths):
    real = batch_of(lengths, 13)
    found = split_batch(real, length, packed=packed)
    numbers = torch.arange(real.numel()).view(real.shape)
    expected = [cut(row[mask].tolist(), length) for row, mask in zip(numbers, real)]
    assert [len(text) for text in expected] == found.present.sum(1).tolist()
    for text, members, present in zip(expected, found.members, found.present):
        for want, place in zip(text, members[present]):
            assert found.tokens[place][found.filled[place]].tolist() == want
    if packed:
        assert len(found.tokens) == sum(map(len, expected))
        assert found.tokens.shape[1] == max(len(part) for text in expected for part in text)
    assert found.filled[:, 0].all()


@pytest.mark.parametrize("length", [2, 4, 30])
@pytest.mark.parametrize("lengths", [[1], [7, 1, 4], [13, 12]])
def test_segments_begin_where_groups_do(length, lengths):
    real = batch_of(lengths, 13)
    draw = torch.Generator().manual_seed(3)
    groups = torch.randint(3, real.shape, generator=draw)
    found = split_batch(real, length, groups=groups)
    numbers = torch.arange(real.numel()).view(real.shape)
    for row in range(len(lengths)):
        here = real[row]
        expected = cut(numbers[row][here].tolist(), length, groups[row][here].tolist())
        members = found.members[row][found.present[row]]
        assert [found.tokens[m][found.filled[m]].tolist() for m in members] == expected
    changed = groups.masked_fill(~real, 7)
    assert torch.equal(split_batch(real, length, groups=changed).tokens, found.tokens)


@pytest.mark.parametrize("packed", [True, False])
def test_to_segments_and_back(packed):
    real = batch_of([9, 3, 1], 11)
    values = torch.randn(3, 11, 2)
    found = split_batch(real, 4, packed=packed)
    assert torch.equal(found.to_tokens(found.to_segments(values)), values * real[..., None])
    states = torch.randn(*found.tokens.shape, 2)
    rows = found.cls_rows(states)
    assert torch.equal(
        found.with_cls_rows(states, rows)[found.members[found.present]],
        states[found.members[found.present]],
    )
    doubled = found.with_cls_rows(states, 2 * rows)[found.members[found.present]]
    expected = states[found.members[found.present]].clone()
    expected[:, 0] *= 2
    assert torch.equal(doubled, expected)


@pytest.mark.parametrize("packed", [True, False])
def test_texts_without_a_cls_token_stand_behind_one(packed):
    real = batch_of([5, 5], 6)
    found = split_batch(real, 4, torch.tensor([True, False]), packed=packed)
    ids = torch.arange(12).view(2, 6)
    led, unled = (ids[row][real[row]].tolist() for row in (0, 1))
    parts = [
        [found.tokens[m][found.filled[m]].tolist() for m in members[present]]
        for members, present in zip(found.members, found.present)
    ]
    assert parts[0] == [led[:4], [led[0], led[4]]]
    assert parts[1] == [[unled[0], *unled[:3]], [unled[0], *unled[3:]]]


def test_it_has_no_layer():
    with pytest.raises(ValueError, match="convert"):
        from hf_hyperattn.registry import get_mechanism

        get_mechanism("hat").layer(ha.HatConfig(), None, "replace", None)
