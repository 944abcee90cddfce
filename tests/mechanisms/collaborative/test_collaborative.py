"""The collaborative score against loops over its formula, forward and gradient, on every engine that takes it."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import Options, attention
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.mechanisms.collaborative.layer import (
    FullLayer,
    SharedLayer,
    own_dimensions,
    shared_score,
)
from hf_hyperattn.mechanisms.collaborative.reference import collaborative_scores, concatenate_heads

HEADS, D = 4, 3


def host(heads=HEADS, kv_heads=None, head_dim=D, rotary=""):
    return Host(
        "layer.0",
        heads,
        kv_heads or heads,
        False,
        False,
        0,
        head_dim=head_dim,
        value_dim=5,
        rotary=rotary,
    )


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def loops(query, key, mixing, scale, content=None):
    """The logits one pair at a time, in Python numbers."""
    (batch, n, rank), m, heads = query.shape, key.shape[1], mixing.shape[0]
    out = torch.zeros(batch, heads, n, m, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                for j in range(m):
                    total = sum(
                        float(mixing[h, r]) * float(query[b, i, r]) * float(key[b, j, r])
                        for r in range(rank)
                    )
                    if content is not None:
                        total += float(content[b, j, h])
                    out[b, h, i, j] = scale * total
    return out


@pytest.mark.parametrize("with_content", [False, True])
@pytest.mark.parametrize("rank", [1, 7, 12])
def test_definition_is_the_formula(rank, with_content):
    query, key, mixing, content = tensors((2, 5, rank), (2, 6, rank), (HEADS, rank), (2, 6, HEADS))
    content = content if with_content else None
    got = collaborative_scores(query, key, mixing, 0.3, content)
    torch.testing.assert_close(got, loops(query, key, mixing, 0.3, content), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("with_content", [False, True])
@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["unit", "saturated"])
def test_engines_agree_with_loops(backend, with_content, scale):
    query, key, mixing, content, value = tensors(
        (2, 5, 7), (2, 6, 7), (HEADS, 7), (2, 6, HEADS), (2, HEADS, 6, 5)
    )
    content = content if with_content else None
    mask = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., 0] = True
    score = shared_score(query, key, mixing, scale, content, HEADS)
    out, _ = attention(score, value, Options(mask=mask), backend=backend)
    weights = (
        loops(query, key, mixing, scale, content).masked_fill(~mask, float("-inf")).softmax(-1)
    )
    torch.testing.assert_close(out, weights @ value, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_gradients_are_those_of_finite_differences(backend):
    given = tensors((1, 3, 5), (1, 4, 5), (HEADS, 5), (1, 4, HEADS), (1, HEADS, 4, 2))

    def out(query, key, mixing, content, value):
        score = shared_score(query, key, mixing, 0.7, content, HEADS)
        return attention(score, value, Options(is_causal=True), backend=backend)[0]

    torch.autograd.gradcheck(out, [t.requires_grad_() for t in given], atol=1e-7)


def call_of(query, key, value, scale=0.5, **options):
    return HostCall(query, key, value, scale, False, Options(**options))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_full_rank_is_the_heads_own_attention(kv_heads):
    query, key, value = tensors((2, HEADS, 5, D), (2, kv_heads, 6, D), (2, kv_heads, 6, 2))
    layer = FullLayer(ha.CollaborativeConfig(), host(kv_heads=kv_heads)).double()
    plan = Plan.from_call(call_of(query, key, value))
    assert layer.identical()
    with torch.no_grad():
        assert layer(plan) is plan
    torch.testing.assert_close(layer.change(plan).run()[0], plan.run()[0], atol=1e-13, rtol=1e-12)


def test_a_head_reads_the_dimensions_of_the_others():
    query, key, value = tensors((1, HEADS, 5, D), (1, HEADS, 6, D), (1, HEADS, 6, 2))
    layer = FullLayer(ha.CollaborativeConfig(), host()).double()
    (delta,) = tensors((HEADS, HEADS * D), seed=3)
    layer.mixing.data.copy_(delta)
    logits = torch.zeros(1, HEADS, 5, 6, dtype=torch.float64)
    for h in range(HEADS):
        for other in range(HEADS):
            weight = delta[h, other * D : other * D + D] + (1.0 if other == h else 0.0)
            logits[:, h] += 0.5 * (query[:, other] * weight) @ key[:, other].mT
    got = layer(Plan.from_call(call_of(query, key, value))).run()[0]
    torch.testing.assert_close(got, logits.softmax(-1) @ value, atol=1e-13, rtol=1e-12)


def test_chosen_heads_alone_change():
    query, key, value = tensors((1, HEADS, 5, D), (1, HEADS, 6, D), (1, HEADS, 6, 2))
    layer = FullLayer(ha.CollaborativeConfig(), host(), heads=(1, 2)).double()
    layer.mixing.data.normal_(generator=torch.Generator().manual_seed(1))
    plan = Plan.from_call(call_of(query, key, value))
    changed = (layer(plan).run()[0] - plan.run()[0]).abs().amax((0, 2, 3)) > 1e-6
    assert changed.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    "options", [dict(softcap=2.0), dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
)
def test_softcap_and_sinks_act_on_its_logits(options):
    query, key, value = tensors((1, HEADS, 5, D), (1, HEADS, 6, D), (1, HEADS, 6, 2))
    layer = FullLayer(ha.CollaborativeConfig(), host()).double()
    plan = Plan.from_call(call_of(query, key, value, **options))
    torch.testing.assert_close(layer.change(plan).run()[0], plan.run()[0], atol=1e-13, rtol=1e-12)


def test_shared_rows_hold_dimensions_then_content_then_zeros():
    rank = 5
    query, key, content = tensors((2, 4, rank), (2, 6, rank), (2, 6, HEADS))
    (value,) = tensors((2, HEADS, 6, 2), seed=4)
    width = HEADS * D

    def rows(*parts):
        row = torch.cat(parts, -1)
        row = torch.nn.functional.pad(row, (0, width - row.shape[-1]))
        return row.unflatten(-1, (HEADS, D)).transpose(1, 2)

    layer = SharedLayer(ha.CollaborativeConfig(rank=rank), host()).double()
    layer.mixing.data.normal_(generator=torch.Generator().manual_seed(1))
    got = layer(Plan.from_call(call_of(rows(query), rows(key, content), value))).run()[0]
    expected = loops(query, key, layer.mixing.data, 0.5, content).softmax(-1) @ value
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_half_precision_computes_in_float32():
    query, key, mixing, value = tensors((2, 5, 7), (2, 6, 7), (HEADS, 7), (2, HEADS, 6, 5))
    half = [t.to(torch.bfloat16) for t in (query, key, mixing, value)]
    out, _ = attention(shared_score(*half[:2], half[2].float(), 0.3, None, HEADS), half[3])
    exact = [t.double() for t in half]
    weights = loops(*exact[:3], 0.3).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ exact[3], atol=2e-6, rtol=1e-5)


def test_layers_start_as_ordinary_heads():
    layer = SharedLayer(ha.CollaborativeConfig(rank=6), host())
    assert torch.equal(layer.mixing.data, own_dimensions(torch.ones(HEADS, 6)))
    assert layer.mixing.sum().item() == 6 and not layer.identical()


def test_concatenated_puts_heads_side_by_side():
    (x,) = tensors((2, 2, 5, D))
    rows = concatenate_heads(x, 4)
    assert rows.shape == (2, 5, 4 * D)
    for h in range(4):
        assert torch.equal(rows[..., h * D : h * D + D], x[:, h // 2])


@pytest.mark.parametrize(
    "wrong, allowed",
    [
        (dict(rank=0), "numbers from 1"),
        (dict(rank=-3), "numbers from 1"),
        (dict(rank=2.5), "int"),
        (dict(rank=True), "int"),
        (dict(steps=-1, rank=4), "numbers from 0"),
        (dict(seed=-1, rank=4), "numbers from 0"),
        (dict(steps=10), "rank=None"),
        (dict(seed=3), "rank=None"),
    ],
)
def test_bad_configs_are_refused(wrong, allowed):
    with pytest.raises(ValueError, match=allowed):
        ha.CollaborativeConfig(**wrong)


def test_layers_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match=r"rank=13 .*allowed: 1 to 12"):
        SharedLayer(ha.CollaborativeConfig(rank=13), host())
    with pytest.raises(ValueError, match="heads=None"):
        SharedLayer(ha.CollaborativeConfig(rank=3), host(), heads=(0,))
    with pytest.raises(ValueError, match="head dimension"):
        FullLayer(ha.CollaborativeConfig(), host(head_dim=None))
    for config in (ha.CollaborativeConfig(), ha.CollaborativeConfig(rank=3)):
        kind = FullLayer if config.rank is None else SharedLayer
        with pytest.raises(ValueError, match=r"rotary positions \(rope_theta\)"):
            kind(config, host(rotary="rope_theta"))
        with pytest.raises(ValueError, match="not a name"):
            kind(config, None)
