"""Sparse attention by the compiled kernel gives what the masks of the rules give."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.functional import sparse_attention
from hf_hyperattn.mechanisms.sparse import Clusters, Exact, Pages, VerticalSlash, Window, compiled
from tests.engines.test_native import needs_compiler
from tests.mechanisms.sparse.test_sparse_models import drawn, sparse

pytestmark = needs_compiler
RULES = (
    Exact(),
    Window(near=20, sinks=3),
    Pages(near=5, sinks=2, page=1, top=9, summary="mean", channels=0.125),
    Pages(near=16, page=8, top=3, summary="mean", query="first", chunk=8),
    Pages(near=10, sinks=0, page=4, top=6, query="previous", chunk=16),
    Pages(near=4, page=16, top=1, query="chunk", chunk=4, channels=0.25),
)


@pytest.fixture
def runs(monkeypatch):
    """How often the kernel ran."""
    count = []
    attend = compiled.attend_by_kernel

    def watched(*arguments, **keywords):
        out = attend(*arguments, **keywords)
        count.append(out is not None)
        return out

    monkeypatch.setattr(compiled, "attend_by_kernel", watched)
    return count


def round_numbers(*shape):
    """Sums of products are exact, and many scores equal."""
    return torch.randint(-2, 3, shape).float()


#: Two heads that the kernel does not know.
OTHERS = (
    *RULES[:2],
    Clusters(near=8, segment=32, size=8, top=2),
    *RULES[3:5],
    VerticalSlash(near=8, every=32, measured=8),
)


@pytest.mark.parametrize("rules", [RULES, OTHERS], ids=["known", "others"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_function_and_gradients(padding, rules, runs):
    q, k, v = (round_numbers(2, heads, 130, 16).requires_grad_() for heads in (6, 3, 3))
    real = torch.ones(2, 130, dtype=torch.bool)
    if padding:
        real[1, : 19 if padding == "left" else None] = padding != "left"
        real[1, 100:] = padding == "left"
    found = []
    for backend in ("auto", "reference"):
        out = sparse_attention(
            q,
            k,
            v,
            real[:, None, None],
            is_causal=True,
            enable_gqa=True,
            rules=rules,
            backend=backend,
        )
        out = out * real[:, None, :, None]
        found.append(
            (out, *torch.autograd.grad((out * v.detach().sum()).square().mean(), (q, k, v)))
        )
    assert runs == [True, False]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_bfloat16(runs):
    q, k, v = (torch.randn(1, heads, 100, 16).bfloat16() for heads in (6, 3, 3))
    one, two = (
        sparse_attention(q, k, v, is_causal=True, enable_gqa=True, rules=RULES, backend=backend)
        for backend in ("auto", "reference")
    )
    assert runs == [True, False] and one.dtype == torch.bfloat16
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


def test_autocast_which_rounds_values_alone(runs):
    q, k, v = (round_numbers(1, heads, 100, 16).requires_grad_() for heads in (6, 3, 3))
    found = []
    for value, backend in ((v, "auto"), (v.bfloat16(), "auto"), (v, "reference")):
        out = sparse_attention(
            q, k, value, is_causal=True, enable_gqa=True, rules=RULES, backend=backend
        )
        assert out.dtype == torch.float32
        found.append((out, *torch.autograd.grad(out.square().mean(), (q, k))))
    assert runs == [True, True, False]
    for mixed, plain, reference in zip(found[1], found[0], found[2], strict=True):
        torch.testing.assert_close(mixed, plain, rtol=0, atol=0)  # such values lose nothing by it
        torch.testing.assert_close(mixed, reference, rtol=1e-4, atol=1e-4)


def test_a_model_under_autocast(runs):
    model = sparse([Pages(near=4, page=4, top=2)] * 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        model(drawn(), use_cache=False).logits.sum().backward()
    assert runs == [True, True]


def test_a_part_of_the_queries(runs):
    q, k, v = round_numbers(1, 6, 20, 16), round_numbers(1, 2, 90, 16), torch.randn(1, 2, 90, 8)
    rules = [RULES[i] for i in (0, 1, 2, 2, 1, 0)]
    one, two = (
        sparse_attention(
            q, k, v, is_causal=True, enable_gqa=True, rules=rules, first=70, backend=backend
        )
        for backend in ("auto", "reference")
    )
    assert runs == [True, False]
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    "rule",
    [
        Pages(near=4, sinks=1, page=4, top=1, summary="mean", query="chunk", chunk=8),
        Pages(near=4, sinks=1, page=4, top=0),
        Pages(near=4, sinks=1, page=4, top=10**9),
    ],
    ids=("a chunk with padding", "no page", "more pages than there are"),
)
def test_padding_inside_a_chunk_and_counts_of_pages(rule, runs):
    q, k, v = torch.randn(2, 2, 53, 8), torch.randn(2, 1, 53, 8), torch.randn(2, 1, 53, 8)
    real = torch.ones(2, 53, dtype=torch.bool)
    real[1, 41:] = False
    one, two = (
        sparse_attention(
            q,
            k,
            v,
            real[:, None, None],
            is_causal=True,
            enable_gqa=True,
            rules=rule,
            backend=backend,
        )
        for backend in ("auto", "reference")
    )
    assert runs == [True, False]
    torch.testing.assert_close(
        one * real[:, None, :, None], two * real[:, None, :, None], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("keys", [0, 5])
def test_fewer_keys_than_queries(keys, runs):
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    one, two = (
        sparse_attention(q, k, v, is_causal=True, rules=Pages(2, 1, 2, 1), backend=backend)
        for backend in ("auto", "reference")
    )
    assert not any(runs) and one.shape == q.shape and (keys or not one.any())
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    "call",
    [
        {"dropout_p": 0.1},
        {"attn_mask": torch.eye(60).roll(-20, 1) == 0},
        {"attn_mask": torch.full((60, 60), 0.1)},
        {"backend": "sdpa"},
    ],
    ids=("dropout", "bool mask", "added mask", "backend"),
)
def test_other_calls_go_by_masks(call, runs):
    q, k, v = (torch.randn(1, 6, 60, 8) for _ in range(3))
    sparse_attention(q, k, v, is_causal=True, rules=RULES, **call)
    assert runs == [False]


def test_an_added_mask_of_zeros_is_served(runs):
    q, k, v = (torch.randn(1, 6, 60, 8) for _ in range(3))
    found = [
        sparse_attention(q, k, v, m, is_causal=True, rules=RULES)
        for m in (torch.zeros(60, 60), None)
    ]
    assert runs == [True, True] and torch.equal(*found)


SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=16, sliding_window=12)
#: Hosts with softcaps, sliding windows, sinks and position biases.
HOSTS = {
    "softcap and windows": lambda hf: hf.Gemma2Config(**GROUPED, attn_logit_softcapping=1.0),
    "windows": lambda hf: hf.MistralConfig(**GROUPED),
    "sinks and windows": lambda hf: hf.GptOssConfig(
        **GROUPED, num_local_experts=2, num_experts_per_tok=1
    ),
    "position bias": lambda hf: hf.MptConfig(
        d_model=64, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=128
    ),
    "alibi": lambda hf: hf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=64),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_hosts_with_more_than_products(host, padded, runs):
    """By the kernel, what `reference` gives by masks, in one call and in steps, also where windows hide most keys."""
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(host(hf)).eval()
    rules = [
        Pages(near=4, page=4, top=2),
        Window(near=6, sinks=2),
        Exact(),
        Pages(near=3, page=1, top=4),
    ]
    ha.patch_model(model, ha.SparseConfig(rules), mode="replace")
    ids, mask = torch.randint(1, 64, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, : 7 if padded else 0] = 0
    found = []
    with torch.no_grad():
        for backend in ("auto", "reference"):
            ha.set_backend(model, backend)
            found.append(model(ids, attention_mask=mask).logits * mask[..., None])
        assert runs == [True] * 2 + [False] * 2
        ha.set_backend(model, "auto")
        first = model(ids[:, :30], attention_mask=mask[:, :30], use_cache=True)
        steps, past = [first.logits], first.past_key_values
        for i in range(30, 40):
            call = model(
                ids[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                past_key_values=past,
                use_cache=True,
            )
            steps.append(call.logits)
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.cat(steps, 1) * mask[..., None], found[1], atol=2e-5, rtol=0)


def model_of(rules, lengths=None):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        pad_token_id=0,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    return ha.patch_model(model, ha.SparseConfig(rules=rules, lengths=lengths), mode="replace")


@pytest.mark.parametrize("padded, rules", [(False, RULES), (True, RULES), (True, OTHERS)])
def test_model_prefills_and_generates(padded, rules, runs):
    model = model_of(rules)
    ids = torch.randint(1, 64, (2, 70))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :11] = 0
    found = []
    for backend in ("auto", "reference"):
        ha.set_backend(model, backend)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits * mask[..., None]
            written = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        found.append((logits, written))
    (logits, written), (other_logits, other_written) = found
    torch.testing.assert_close(logits, other_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(written, other_written)
    assert runs.count(True) == 2 * 21


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("second", [RULES[::-1], OTHERS], ids=["known", "others"])
def test_rules_for_several_lengths(second, padded, runs):
    """Also where a prompt and generated tokens cross a length; rows that cross it at different queries go by masks."""
    model = model_of([RULES, second, RULES[2:] + RULES[:2]], lengths=(20, 75, 90))
    ids = torch.randint(1, 64, (2, 70))
    mask = torch.ones_like(ids)
    mask[1, : 3 if padded else 0] = 0
    found = []
    for backend in ("auto", "reference"):
        ha.set_backend(model, backend)
        runs.clear()
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits * mask[..., None]
            written = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
        found.append((logits, written))
        # 2 layers, the prompt twice and 15 tokens; the row with padding crosses token 75 three tokens later.
        kernel = 0 if backend == "reference" else 2 * 12 if padded else 2 * 17
        assert runs.count(True) == kernel
    (logits, written), (other_logits, other_written) = found
    torch.testing.assert_close(logits, other_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(written, other_written)


@pytest.mark.parametrize("length", [24, 29])
def test_a_length_that_cuts_a_chunk(length):
    """A chunk chooses by all its queries, also by those after the length, for which other rules hold."""
    rules = [[Pages(near=4, page=4, top=top, query="chunk", chunk=8)] for top in (1, 2)]
    model, found = model_of(rules, lengths=(length, 64)), []
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data.mul_(15)  # so that the choice shows in the logits
    ids = torch.randint(1, 64, (2, 64), generator=torch.Generator().manual_seed(3))
    for backend in ("auto", "reference"):
        ha.set_backend(model, backend)
        with torch.no_grad():
            found.append(model(ids, use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_several_lengths_learn_by_the_kernel(padded, runs):
    model = model_of([RULES, RULES[::-1]], lengths=(33, 64)).train()
    ids, found = torch.randint(1, 64, (1, 70)), []
    mask = torch.ones_like(ids)
    mask[0, : 5 if padded else 0] = 0
    for backend in ("auto", "reference"):
        ha.set_backend(model, backend)
        model.zero_grad()
        (model(ids, attention_mask=mask).logits * mask[..., None]).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert runs == [True] * 2 + [False] * 2
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("keys", ["random", "round", "equal", "rising", "one of a kind"])
def test_choices_among_many_keys(keys, runs):
    """A sample of the scores tells which others are looked at; ties and lopsided scores do not change the choice."""
    length = 1100
    q, v = round_numbers(1, 2, length, 16) + 1, torch.randn(1, 2, length, 16)
    k = {
        "random": torch.randint(-9, 10, (1, 2, length, 16)).float(),
        "round": round_numbers(1, 2, length, 16),
        "equal": torch.ones(1, 2, length, 16),
        "rising": torch.arange(float(length)).view(1, 1, -1, 1).expand(1, 2, -1, 16).contiguous(),
        "one of a kind": torch.eye(length)[:, :16].expand(1, 2, -1, -1).contiguous() * 3 - 1,
    }[keys]
    options = {"near": 3, "page": 1, "summary": "mean"}
    rules = (
        Pages(top=20, channels=0.25, **options),
        Pages(top=300, query="previous", chunk=4, channels=0.5, **options),
    )
    found = [
        sparse_attention(q, k, v, is_causal=True, scale=1e-3, rules=rules, backend=b)
        for b in ("auto", "reference")
    ]
    assert runs == [True, False]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    every = sparse_attention(
        q, k, v, is_causal=True, scale=1e-3, rules=Pages(top=10**17, **options)
    )
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1e-3)
    torch.testing.assert_close(every, whole, rtol=1e-4, atol=1e-4)
    one = sparse_attention(
        q[:, :1, -1:],
        k[:, :1],
        v[:, :1],
        is_causal=True,
        scale=1e-3,
        rules=rules[0],
        first=length - 1,
    )
    torch.testing.assert_close(one, found[1][:, :1, -1:], rtol=1e-4, atol=1e-4)
