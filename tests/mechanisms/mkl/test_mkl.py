"""Multiple kernel learning against loops: the three forms, with any score, in every engine, forward and backward."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import cone_scores, hype_bias, mkl_attention
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import FirstKey, Host, HostCall
from hf_hyperattn.mechanisms.mkl import MklConfig
from hf_hyperattn.mechanisms.mkl.reference import head_weights
from tests.integration.models import perturb
from tests.oracles import mkl as by_hand
from tests.oracles.cases import BACKENDS, assert_close, qkv, tensor
from tests.oracles.softmax import attention

FORMS = {
    "global": MklConfig(),
    "conditional": MklConfig(kind="conditional"),
    "combined": MklConfig(combine=True),
    "combined conditional": MklConfig(kind="conditional", combine=True),
}
every_form = pytest.mark.parametrize("form", FORMS)
FACTS = dict(
    heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0, head_dim=6, value_dim=5
)


def weighted(logits, form, row, column):
    """By hand: logits [B, H, N, M] as the form has them."""
    if form.endswith("conditional"):
        logits = by_hand.conditional_logits(logits, row, column)
    else:
        logits = by_hand.global_logits(logits, row)
    return by_hand.combined_logits(logits) if form.startswith("combined") else logits


def betas(form, n=5, m=7):
    """`beta` and `key_beta` of the function."""
    if form.endswith("conditional"):
        return tensor(2, 4, n, seed=11, scale=2.0), tensor(2, 4, m, seed=12, scale=2.0)
    return tensor(4, seed=11, scale=2.0), None


# The function.


@every_form
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_it_is_what_the_formula_says(form, backend):
    q, k, v = qkv(2, 4, 2, lq=5, lk=7, d=6, dv=3, seed=1, scale=2.0)
    row, column = betas(form)
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[0, :, 2] = False
    out = mkl_attention(
        q,
        k,
        v,
        mask,
        scale=0.4,
        enable_gqa=True,
        beta=row,
        key_beta=column,
        combine=form.startswith("combined"),
        backend=backend,
    )
    logits = 0.4 * torch.einsum("bhnd,bhmd->bhnm", q, k.repeat_interleave(2, 1))
    expected, _ = attention(weighted(logits.numpy(), form, row, column), v, mask=mask)
    assert_close(out, torch.from_numpy(expected), 1e-12)
    assert not out[0, :, 2].any()


@every_form
def test_gradcheck(form):
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 2, lq=3, lk=3, d=2, dv=2, seed=4))
    row, column = (
        t if t is None else t[:1].clone() if t.dim() == 3 else t for t in betas(form, 3, 3)
    )
    leaves = [q, k, v, *(t.requires_grad_() for t in (row, column) if t is not None)]

    def run(q, k, v, row, column=None):
        return mkl_attention(
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=True,
            beta=row,
            key_beta=column,
            combine=form.startswith("combined"),
        )

    assert torch.autograd.gradcheck(run, leaves)


def test_uniform_weights_change_nothing_but_the_combined_form():
    q, k, v = qkv(2, 4, 2, lq=30, lk=30, d=8, seed=7, dtype=torch.float32)
    plain = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    how = dict(is_causal=True, enable_gqa=True)
    assert_close(mkl_attention(q, k, v, **how, beta=torch.full((4,), 3.0)), plain, 2e-6)
    ones = torch.full((2, 4, 30), 3.0)
    assert_close(mkl_attention(q, k, v, **how, beta=ones, key_beta=ones), plain, 2e-6)
    # the combined form is one head of all the widths: the sum of dot products is that of the whole vectors
    out = mkl_attention(q, k, v, **how, beta=torch.zeros(4), combine=True)
    whole = [
        t.repeat_interleave(4 // t.shape[1], 1).transpose(1, 2).flatten(2)[:, None]
        for t in (q, k, v)
    ]
    expected = (
        sdpa(*whole, is_causal=True, scale=8**-0.5)[:, 0].unflatten(-1, (4, 8)).transpose(1, 2)
    )
    assert_close(out, expected, 2e-6)


def test_weights_sum_to_the_number_of_heads():
    for beta in (tensor(5, seed=1, scale=4.0), tensor(2, 5, 3, seed=1, scale=4.0)):
        weight = head_weights(beta)
        assert_close(
            weight.sum(min(1, beta.dim() - 1)),
            torch.full_like(weight.sum(min(1, beta.dim() - 1)), 5.0),
            1e-12,
        )
        part = head_weights(beta, (1, 4))
        index = torch.tensor([0, 2, 3])
        assert torch.equal(
            part.index_select(min(1, beta.dim() - 1), index),
            torch.ones_like(part).index_select(min(1, beta.dim() - 1), index),
        )
        assert_close(
            part.sum(min(1, beta.dim() - 1)),
            torch.full_like(part.sum(min(1, beta.dim() - 1)), 5.0),
            1e-12,
        )
    extreme = head_weights(torch.tensor([1e4, -1e4, 0.0]))
    assert extreme.tolist() == [3.0, 0.0, 0.0]


def test_refused_arguments():
    q, k, v = qkv(2, 4, 2)
    for given, said in (
        (dict(beta=torch.zeros(2)), r"beta has shape \(2,\); allowed: \(4,\)"),
        (
            dict(beta=torch.zeros(4), key_beta=torch.zeros(2, 4, 5)),
            r"beta has shape \(4,\); allowed: \(2, 4, 5\)",
        ),
        (dict(beta=torch.zeros(2, 4, 5), key_beta=torch.zeros(4)), r"key_beta has shape \(4,\)"),
        (
            dict(beta=torch.zeros(4), combine=True, attn_mask=torch.zeros(1, 4, 5, 5)),
            ".* a mask for every head",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            mkl_attention(q, k, v, enable_gqa=True, **given)


# In a host: any score, biases, caps, sinks.


def hyper_of(config, others=(), heads=None):
    mode = "replace" if config.combine else "blend"
    hyper = Hyper(
        ha.HyperAttnConfig([config, *others], mode=mode, heads=heads), Host("host", **FACTS)
    )
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": hyper})}), 0.4)
    return hyper.double(), {type(layer).__name__: layer for layer in hyper.layers()}


def call_of(n=7, **options):
    q, k, v = tensor(2, 4, n, 6, seed=1), tensor(2, 2, n, 6, seed=2), tensor(2, 2, n, 5, seed=3)
    return HostCall(q, k, v, 0.4, True, Options(is_causal=True, **options))


def expected_of(form, layers, call, logits, cap=None):
    """By hand from a host's own logits."""
    layer = layers["MklLayer"]
    if form.endswith("conditional"):
        row = column = by_hand.image(call.value, layer.value_map.detach())
    else:
        row, column = layer.beta.detach().numpy(), None
    return weighted(logits.detach().numpy(), form, row, column)


def dots(call):
    return call.scale * torch.einsum(
        "bhnd,bhmd->bhnm", call.query, call.key.repeat_interleave(2, 1)
    )


BIAS = tensor(1, 4, 7, 7, seed=9)
OPTIONS = {
    "plain": {},
    "bias": dict(bias=BIAS),
    "cap": dict(softcap=0.5),
    "cap and bias": dict(softcap=0.5, bias=BIAS),
    "sinks": dict(sinks=tensor(4, seed=6)),
}


@pytest.fixture(params=[False, True], ids=["dense", "tiles"])
def small_or_tiles(request, monkeypatch):
    """Whether `auto` may take the definition of so few pairs, or must cut tiles."""
    if request.param:
        monkeypatch.setattr("hf_hyperattn.engines.dispatch.choose_engine", lambda *_: "blockwise")
        monkeypatch.setattr("hf_hyperattn.engines.dispatch.RESOLVED", {})
        monkeypatch.setattr("hf_hyperattn.engines.blockwise.FORWARD_ELEMENTS", 60)
        monkeypatch.setattr("hf_hyperattn.engines.blockwise.BACKWARD_ELEMENTS", 40)
        monkeypatch.setattr(
            "hf_hyperattn.mechanisms.talking_heads.operator.is_small", lambda score: False
        )
        monkeypatch.setattr(
            "hf_hyperattn.mechanisms.talking_heads.operator.count_tile_rows",
            lambda n, *_: min(2, n),
        )


@pytest.mark.parametrize(
    "form, options", [(f, o) for f in FORMS for o in OPTIONS if "combined" not in f or o != "sinks"]
)
def test_it_acts_on_logits_with_cap_and_bias_and_before_sinks(form, options, small_or_tiles):
    hyper, layers = hyper_of(FORMS[form])
    call = call_of(**OPTIONS[options])
    logits, given = dots(call), dict(OPTIONS[options])
    cap, bias = given.pop("softcap", None), given.pop("bias", 0.0)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) + bias
    expected, _ = attention(
        expected_of(form, layers, call, logits), call.value, causal=True, **given
    )
    assert_close(hyper(call)[0], torch.from_numpy(expected), 1e-12)


SCORES = {
    "cone": ha.ConeConfig(),
    "penumbral": ha.ConeConfig(variant="penumbral"),
    "hype": ha.HypeConfig(mu=0.2, tau=3.0),
    "both": (ha.ConeConfig(), ha.HypeConfig(mu=0.2, tau=3.0)),
}


def score_logits(name, layers, call):
    """Blended logits from the definitions of other rooms."""
    total = dots(call)
    if name != "hype":
        layer = layers["ConeLayer"]
        how = {"gamma": layer.log_gamma.exp(), "radius": layer.log_radius.exp()}
        how["variant"] = "penumbral" if name == "penumbral" else "umbral"
        total = total + layer.gate[:, None, None] * cone_scores(call.query, call.key, **how)
    if name in ("hype", "both"):
        layer = layers["HypeLayer"]
        at, mu, tau = torch.arange(7), 0.2 * layer.log_mu.exp(), 3.0 * layer.log_tau.exp()
        total = total + layer.gate[:, None, None] * hype_bias(at, at, mu=mu, tau=tau, form="sinh")
    return total


@every_form
@pytest.mark.parametrize("name", SCORES)
def test_it_weighs_any_score(form, name, small_or_tiles):
    """And its gradients are those of the dense expression."""
    others = SCORES[name] if isinstance(SCORES[name], tuple) else (SCORES[name],)
    mixed = FORMS[form]
    if mixed.combine:  # no blend: the others then replace the score, which is what is tested here
        hyper, layers = hyper_of(MklConfig(kind=mixed.kind), others)
        layers["MklLayer"].config = mixed
    else:
        hyper, layers = hyper_of(mixed, others)
    call = call_of()
    leaves = [t.requires_grad_() for t in (call.query, call.key, call.value)] + list(
        hyper.parameters()
    )
    out = hyper(call)[0]
    logits = score_logits(name, layers, call)
    layer = layers["MklLayer"]
    if mixed.kind == "global":
        logits = logits * (4 * layer.beta.softmax(0))[:, None, None]
    else:
        flat = call.value.transpose(1, 2).flatten(2)
        weight = 4 * (flat @ layer.value_map.T).softmax(-1).transpose(1, 2)
        logits = logits * weight[..., None] * weight[..., None, :]
    logits = logits.sum(1, keepdim=True).expand(-1, 4, -1, -1) if mixed.combine else logits
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ call.value.repeat_interleave(
        2, 1
    )
    assert_close(out, expected, 1e-7)
    weight = tensor(*out.shape, seed=3)
    found, wanted = (torch.autograd.grad((o * weight).sum(), leaves) for o in (out, expected))
    for one, other in zip(found, wanted):
        assert_close(one, other, 1e-6)


def test_chosen_heads_share_the_weights_among_themselves():
    for form in ("global", "conditional"):
        hyper, layers = hyper_of(FORMS[form], heads=[0, 3])
        call = call_of()
        plain = torch.from_numpy(attention(dots(call), call.value, causal=True)[0])
        out = hyper(call)[0]
        assert_close(out[:, 1:3], plain[:, 1:3], 1e-12)
        logits, layer = dots(call)[:, [0, 3]].numpy(), layers["MklLayer"]
        if form == "global":
            logits = by_hand.global_logits(logits, layer.beta.detach()[[0, 3]].numpy())
        else:
            beta = by_hand.image(call.value, layer.value_map.detach())[:, [0, 3]]
            logits = by_hand.conditional_logits(logits, beta, beta)
        expected, _ = attention(logits, call.value, causal=True)
        assert_close(out[:, [0, 3]], torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize("form", ["global", "conditional", "combined", "combined conditional"])
def test_dropout_and_weights(form):
    hyper, _ = hyper_of(FORMS[form])
    out, weights = hyper(call_of(), weights=True)
    assert weights.shape == (2, 4, 7, 7)
    assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64), 1e-12)
    assert_close(weights @ call_of().value.repeat_interleave(2, 1), out, 1e-12)
    torch.manual_seed(0)
    total = sum(hyper(call_of(dropout_p=0.5))[0] for _ in range(400)) / 400
    assert (total - out).abs().max() < 0.2


def test_long_sequences_take_the_fast_engine_and_agree(monkeypatch):
    """Global weights go into the query and are SDPA's; conditional ones into queries and keys."""
    seen = []
    q, k, v = (tensor(1, h, 300, 16, seed=h, dtype=torch.float32) for h in (4, 2, 2))

    def spy(*args, **kwargs):
        seen.append(1)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr("hf_hyperattn.engines.sdpa.scaled_dot_product_attention", spy)
    for form in ("global", "conditional", "combined"):
        row, column = (t if t is None else t.float() for t in betas(form, 300, 300))
        row, column = (t if t is None or t.dim() == 1 else t[:1] for t in (row, column))
        how = dict(
            is_causal=True, enable_gqa=True, beta=row, key_beta=column, combine=form == "combined"
        )
        with torch.no_grad():
            out = mkl_attention(q, k, v, **how)
        assert_close(out, mkl_attention(q, k, v, **how, backend="reference"), 1e-5)
    assert len(seen) == 3


# Where the queries' own values are.


@pytest.mark.parametrize("causal", [True, False])
def test_a_call_that_does_not_say_which_keys_are_the_queries_own(causal):
    hyper, _ = hyper_of(FORMS["conditional"])
    call = call_of()
    whole = hyper(call)[0]
    last = HostCall(
        call.query[:, :, 4:], call.key, call.value, 0.4, causal, Options(is_causal=causal, offset=4)
    )
    if not causal:
        with pytest.raises(
            ValueError, match="mkl cannot tell which of 7 keys are those of the 3 queries in host"
        ):
            hyper(last)
        return
    assert_close(hyper(last)[0], whole[:, :, 4:], 1e-12)
    # a static cache: slots behind the last key, said by the mask alone, or by the call
    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 4)) for t in (call.key, call.value))
    mask = torch.ones(7, 11, dtype=torch.bool).tril()[None, None, 4:]
    for first in (FirstKey(), FirstKey(stop=7), FirstKey(stop=torch.tensor(7))):
        static = HostCall(
            call.query[:, :, 4:], key, value, 0.4, True, Options(mask=mask), first=first
        )
        assert_close(hyper(static)[0], whole[:, :, 4:], 1e-12)
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(
        ~mask, torch.finfo(torch.float32).min
    )
    static = HostCall(call.query[:, :, 4:], key, value, 0.4, True, Options(mask=numbers))
    assert_close(hyper(static)[0], whole[:, :, 4:], 1e-12)
