"""The Triton kernels for listed keys against the definition: a mask, and softmax in float64.

Without a GPU they run in Triton's interpreter; test_triton_modes.py starts a process for it.
"""

import random

import pytest
import torch

from hf_hyperattn.engines.selected import SUMMARIES, HeadRule, shapes_of_choice
from tests.engines.test_selected_native import RULES, SHAPES, any_rule, defined, inputs, some_pages
from tests.engines.test_triton import devices, slow

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.extras
#: More rules: many chunks in a block, chunks longer than one, odd sizes of chunks and pages, many first keys.
MORE_RULES = [
    *RULES,
    HeadRule(30, 21, page=10, chunk=24, top=3),
    HeadRule(5, 0, page=64, chunk=128, top=1),
    HeadRule(1, 37, page=16, chunk=2, top=2),
    HeadRule(9, 1, page=5, chunk=3, top=4),
    HeadRule(3, 2, page=80, chunk=4, top=1),
    HeadRule(3, 2, page=67, chunk=16, top=1),
]


def attend(device, q, k, v, rules, chosen, spans, **settings):
    from hf_hyperattn.engines.selection import Lists
    from hf_hyperattn.engines.triton.selected import selected_attention

    chosen = Lists(chosen.rows.to(device), chosen.shapes)
    moved = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()
    }
    return selected_attention(
        *(t.to(device) for t in (q, k, v)), rules, chosen, spans=spans, **moved
    ).cpu()


def mostly_slow(*fast):
    """All shapes; those that are not named take too long in the interpreter for every run."""
    names = [name if name in fast else pytest.param(name, marks=slow) for name in SHAPES]
    return pytest.mark.parametrize("name", names)


@devices
@pytest.mark.parametrize("alike", [False, True], ids=["", "alike"])
@mostly_slow("padded", "three queries")
def test_forward_is_the_definition(device, name, alike):
    q, k, v, rules, chosen, offset, spans = inputs(name, MORE_RULES, 2, alike, alike)
    out = attend(device, q, k, v, rules, chosen, spans, offset=offset)
    expected = defined(q, k, v, rules, chosen, offset, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@devices
@mostly_slow("short padded cache")
def test_gradient_is_that_of_the_definition(device, name):
    *tensors, rules, chosen, offset, spans = inputs(name, MORE_RULES)
    q, k, v = (t.requires_grad_() for t in tensors)
    sinks = torch.randn(len(rules), requires_grad=True)
    settings = {"softcap": 3.0, "window": 60, "sinks": sinks}
    bias = torch.randn(len(q), len(rules), k.shape[2])
    out = attend(device, q, k, v, rules, chosen, spans, offset=offset, bias=bias, **settings)
    expected = defined(q, k, v, rules, chosen, offset, spans, bias=bias, **settings)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v, sinks), grad)
    wanted = torch.autograd.grad(expected, (q, k, v, sinks), grad.double())
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


#: Rules whose blocks have several tiles of each kind.
LONG = [
    HeadRule(150, 5, page=1, chunk=16, top=110),
    HeadRule(20, 70, page=4, chunk=64, top=40),
    HeadRule(170, 3),
    HeadRule(10, 0, page=16, chunk=32, top=12),
]


@devices
def test_many_tiles_of_each_kind(device):
    queries, keys, offset, spans = 200, 420, 220, ([0, 9], [420, 420])
    q, k, v = (
        torch.randn(2, 4, queries, 16),
        torch.randn(2, 2, keys, 16),
        torch.randn(2, 2, keys, 8),
    )
    chosen = some_pages(LONG, queries, keys, offset, spans, alike=True)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attend(device, q, k, v, LONG, chosen, spans, offset=offset)
    expected = defined(q, k, v, LONG, chosen, offset, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


@devices
def test_a_bias_that_hides_a_whole_tile(device):
    q, k, v = (torch.randn(1, 2, 130, 16) for _ in "qkv")
    rules, spans = [HeadRule(1000), HeadRule(3, 1, page=4, chunk=16, top=9)], ([0], [130])
    bias = torch.zeros(1, 2, 130)
    bias[..., :64] = -torch.inf
    chosen = some_pages(rules, 130, 130, 0, spans)
    out = attend(device, q, k, v, rules, chosen, spans, bias=bias)
    expected = defined(q, k, v, rules, chosen, 0, spans, bias=bias)
    # Rows that see no other key have no definition.
    seen = expected.isfinite()
    torch.testing.assert_close(out.double()[seen], expected[seen], rtol=1e-5, atol=1e-5)
    assert out[:, 0, 64:].isfinite().all()


@devices
def test_sizes_beyond_every_text(device):
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in "qkv")
    rules, spans = [HeadRule(5, 2, 2**40, 1, 1), HeadRule(5, 1, 4, 2**40, 2)], ([0], [40])
    chosen = some_pages(rules, 40, 40, 0, spans)
    out = attend(device, q, k, v, rules, chosen, spans)
    expected = defined(q, k, v, rules, chosen, 0, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("queries", [1, 16])
def test_keys_shared_out_to_several_programs(device, queries, monkeypatch):
    from hf_hyperattn.engines.triton import launch

    monkeypatch.setattr(launch, "PART", 16)
    q, (k, v) = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 2, 420, 16)
    spans, sinks, offset = ([0, 400], [420, 420]), torch.randn(4), 420 - queries
    chosen = some_pages(LONG, queries, 420, offset, spans)
    settings = {"sinks": sinks, "window": 300, "softcap": 5.0}
    out = attend(device, q, k, v, LONG, chosen, spans, offset=offset, **settings)
    expected = defined(q, k, v, LONG, chosen, offset, spans, **settings)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@devices
def test_pages_that_all_queries_of_a_block_chose_need_no_mask(device):
    from hf_hyperattn.engines.triton.selected import ListedCall

    rule = HeadRule(1, 0, page=4, chunk=16, top=6)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in "qkv")
    chosen = some_pages([rule], 128, 128, 0, ([0], [128]))
    table = chosen.of_heads()[0]
    table[:] = torch.tensor([0, 1, 2, -1, -1, -1])
    table[:, 6, 3] = 9  # one chunk of the second block chooses another page
    settings = [*rule], [0, 128], 0, 1.0, 0.0, 0, 0, None, None
    call = ListedCall(*(t.to(device) for t in (q, k, v, chosen.rows)), *settings)
    ((group, first, blocks),) = call.list_launches()
    tables = call.make_tables(group, first, blocks)
    # Block 0 has no page before its near keys.
    assert tables.counts[0, 0, :2].tolist() == [[0, 0], [3, 4]]
    assert tables.listed[0, 0, 1, :4, 0].tolist() == [0, 1, 2, 9]


@devices
def test_tiles_of_near_keys_read_no_entry_behind_the_lists(device):
    """With a few summaries, the list of a block is shorter than the entries that a tile reads."""
    from hf_hyperattn.engines.triton.selected import ListedCall

    rule = HeadRule(1000, 0, page=128, chunk=128, top=2, by=SUMMARIES)
    q, k, v = (torch.randn(1, 1, n, 16, device=device) for n in (256, 258, 258))
    ((chunks, most),) = shapes_of_choice([rule], 256, 258)
    chosen = torch.full((1, chunks * most), -1, dtype=torch.int32, device=device)
    call = ListedCall(q, k, v, chosen, [*rule], [2, 258], 2, 1.0, 0.0, 0, 2, None, None)
    ((group, first, blocks),) = call.list_launches()
    listed = call.make_tables(group, first, blocks).listed
    behind_last_list = (listed.numel() - 2 * listed.shape[3]) * listed.element_size()
    read = 2 * call.config.columns * listed.element_size()
    assert listed.untyped_storage().nbytes() >= behind_last_list + read


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(device, dtype):
    *tensors, rules, chosen, offset, spans = inputs("later")
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors)
    out = attend(device, q, k, v, rules, chosen, spans, offset=offset)
    assert out.dtype == dtype
    expected = defined(q, k, v, rules, chosen, offset, spans)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-2)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), grad.to(dtype))
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g.double(), e.double(), rtol=6e-2, atol=6e-2)


@devices
@slow
def test_small_tables_change_nothing(device, monkeypatch):
    """Long texts are computed in several launches; the sums of keys' gradients go on from one to the next."""
    from hf_hyperattn.engines.triton import selected

    *tensors, rules, chosen, offset, spans = inputs("square", MORE_RULES)
    q, k, v = (t.requires_grad_() for t in tensors)
    found = []
    for least in (2**25, 1):
        monkeypatch.setattr(selected, "LEAST_BYTES", least)
        monkeypatch.setattr(selected, "SHARE", 0)
        out = attend(device, q, k, v, rules, chosen, spans, offset=offset)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])


@devices
@pytest.mark.parametrize("window", [None, 14])
def test_nothing_behind_the_keys_is_read(device, window):
    """Keys lie in a tensor of NaN; queries far behind them see few keys, with a window none."""
    rules, spans = (
        [HeadRule(3, 33, page=9, chunk=16, top=7), HeadRule(7, 31, 38)],
        ([0, 3], [14, 14]),
    )
    q = torch.randn(2, 2, 128, 16)
    k, v = (torch.full((2, 1, 200, 16), torch.nan)[:, :, :14] for _ in "kv")
    k[:], v[:] = torch.randn(2, *k.shape)
    chosen = some_pages(rules, 128, 14, 0, spans)
    out = attend(device, q, k, v, rules, chosen, spans, window=window)
    expected = defined(q, k, v, rules, chosen, 0, spans, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@devices
@slow
@pytest.mark.parametrize("seed", range(40))
def test_any_rules_at_any_place(device, seed):
    pick = random.Random(seed)
    torch.manual_seed(seed)
    rules, alike = [any_rule(pick), any_rule(pick)], pick.random() < 0.5
    d, dv = (pick.choice((64, 16, 31)) for _ in "kv")
    queries, keys = pick.randint(1, 150), pick.randint(1, 240)
    offset, start = pick.randint(0, keys), pick.choice((0, pick.randint(0, keys)))
    spans = [0, start], [keys, pick.choice((keys, pick.randint(start, keys)))]
    q, k, v = torch.randn(2, 2, queries, d), torch.randn(2, 1, keys, d), torch.randn(2, 1, keys, dv)
    chosen = some_pages(rules, queries, keys, offset, spans, alike)
    window = pick.choice((None, None, keys, max(1, keys // 2)))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attend(device, q, k, v, rules, chosen, spans, offset=offset, window=window)
    expected = defined(q, k, v, rules, chosen, offset, spans, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


@devices
def test_sparse_rules_take_the_kernel(device, monkeypatch):
    """By name of the engine on a CPU, by themselves on a GPU; nothing of them runs under a mask."""
    from hf_hyperattn.functional import sparse_attention
    from hf_hyperattn.mechanisms.sparse import compiled, functional
    from hf_hyperattn.rules import Pages, Window

    def fail(*arguments, **named):
        raise AssertionError("a mask of all pairs")

    rules = (
        Pages(near=9, sinks=3, page=4, top=3, summary="mean", query="previous", chunk=16),
        Pages(near=5, sinks=1, page=1, top=7, query="first", chunk=8, channels=0.5),
        Window(near=12, sinks=2),
        Pages(near=20, page=16, top=2),
    )
    q, k, v = (torch.randn(2, heads, 150, 32, device=device) for heads in (4, 2, 2))
    real = torch.ones(2, 1, 1, 150, dtype=torch.bool, device=device)
    real[0, ..., :31] = False
    real[1, ..., 140:] = False
    mask = real & torch.ones(150, 150, dtype=torch.bool, device=device).tril()
    expected = sparse_attention(
        q, k, v, rules=rules, attn_mask=mask, is_causal=True, enable_gqa=True, backend="reference"
    )
    monkeypatch.setattr(functional, "mask_by_rules", fail)
    monkeypatch.setattr(compiled, "attend_by_masks", fail)
    backend = "auto" if device == "cuda" else "triton"
    out = sparse_attention(
        q, k, v, rules=rules, attn_mask=mask, is_causal=True, enable_gqa=True, backend=backend
    )
    # Padded queries have no place in a text.
    seen = real[:, 0, 0][:, None, :, None]
    torch.testing.assert_close(out * seen, expected * seen, rtol=1e-5, atol=1e-5)
