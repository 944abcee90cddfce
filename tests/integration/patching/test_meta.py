"""Patched models without values: the meta device, FakeTensorMode, FLOP counters and memory estimators."""

import pytest
import torch
import transformers as hf
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import hf_hyperattn as ha
from hf_hyperattn.engines import cpu
from tests.integration.models import bert, difference, llama, perturb, run, text_inputs
from tests.integration.patches import patched

LENGTH = 24
PATCHES = {
    "cone": (llama, ha.ConeConfig()),
    "penumbral": (llama, ha.ConeConfig(variant="penumbral")),
    "hyperbolic": (llama, ha.HyperbolicConfig()),
    "hype": (llama, ha.HypeConfig()),
    "hype, bidirectional": (bert, ha.HypeConfig()),
    "hsa": (llama, ha.HsaConfig(windows=(2, 4))),
    "hsa, bidirectional": (bert, ha.HsaConfig(windows=(2, 4))),
    "head_fusion": (llama, ha.HeadFusionConfig()),
    "talking_heads": (llama, ha.TalkingHeadsConfig()),
    "collaborative": (bert, ha.CollaborativeConfig()),
    "mkl": (llama, ha.MklConfig()),
    "conditional": (llama, ha.MklConfig(kind="conditional")),
    "trilinear": (llama, ha.TrilinearConfig()),
    "windowed": (llama, ha.TrilinearConfig(windows=(4, 2))),
    "bidaf": (llama, ha.TrilinearConfig(form="bidaf", windows=None)),
    "together": (
        llama,
        ha.ConeConfig(),
        ha.HypeConfig(),
        ha.TalkingHeadsConfig(),
        ha.HeadFusionConfig(),
    ),
}


def patched_then_moved(make, *configs, **options):
    return ha.patch_model(make(num_hidden_layers=1), *configs, **options).to("meta")


def patched_on_meta(make, *configs, **options):
    with torch.device("meta"):
        return ha.patch_model(make(num_hidden_layers=1), *configs, **options)


def patched_without_memory(make, *configs, **options):
    with init_empty_weights():
        model = make(num_hidden_layers=1)
    return ha.patch_model(model, *configs, **options)


def call(model, device, mask, length=LENGTH):
    """One call with its backward pass, and one without gradients; the shape of the first output."""
    inputs = {"input_ids": torch.zeros(2, length, dtype=torch.long, device=device)}
    if mask:
        inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long, device=device)
    out = model(**inputs)[0]
    out.sum().backward()
    with torch.no_grad():
        assert model(**inputs)[0].shape == out.shape
    return tuple(out.shape)


def expected(make):
    return (2, LENGTH, 99 if make is llama else 32)


def run_on_meta(model, make):
    assert all(p.is_meta for p in model.parameters())
    for mask in (True, False):
        assert call(model, "meta", mask) == expected(make)
    assert all(p.grad.shape == p.shape for n, p in model.named_parameters() if ".hyper." in n)
    ha.describe(model)
    ha.unpatch_model(model)


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("name", PATCHES)
def test_meta(name, mode):
    make, *configs = PATCHES[name]
    run_on_meta(patched_without_memory(make, *configs, mode=mode), make)


@pytest.mark.parametrize("road", [patched_then_moved, patched_on_meta])
def test_other_roads_to_meta(road):
    make, *configs = PATCHES["together"]
    run_on_meta(road(make, *configs), make)


def test_memory_estimators_build_from_the_config_of_a_patched_model():
    config = ha.patch_model(llama(), ha.ConeConfig()).config
    with init_empty_weights(include_buffers=True):
        model = hf.AutoModelForCausalLM.from_config(config)
    added = 4 * 3 * 4 * 4  # layers · parameters · heads · bytes
    assert calculate_maximum_sizes(model)[0] == calculate_maximum_sizes(llama())[0] + added


def test_hat():
    """On the meta device masks are refused by Transformers itself, for stock models with SDPA too."""
    with FakeTensorMode():
        model = ha.HatModel(
            ha.HatEncoderConfig(vocab_size=99, hidden_size=32, num_attention_heads=4)
        )
        assert call(model, "cpu", True) == (2, LENGTH, 32)


@pytest.mark.parametrize("causal", [True, False])
def test_a_given_hierarchy(causal):
    query, key, value = (torch.zeros(1, h, 12, 8, device="meta") for h in (4, 2, 2))
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool, device="meta")
    for hierarchy in (
        ha.Hierarchy.windows(12, (2, 6)),
        torch.zeros(1, 12, 2, dtype=torch.long, device="meta"),
    ):
        out = ha.functional.hierarchical_attention(
            query,
            key,
            value,
            mask,
            is_causal=causal,
            enable_gqa=True,
            hierarchy=hierarchy,
            tying="key" if causal else "both",
        )
        assert out.shape == query.shape


@pytest.mark.parametrize("name", PATCHES)
def test_fake_tensors_and_nothing_of_them_is_kept(name):
    make, *configs = PATCHES[name]
    torch.manual_seed(0)
    model, inputs = ha.patch_model(make(num_hidden_layers=1), *configs), text_inputs()
    perturb(model)
    before = run(model, inputs)
    with FakeTensorMode():
        fake = ha.patch_model(make(num_hidden_layers=1), *configs)
        for mask in (True, False):
            call(fake, "cpu", mask, length=11)
    assert difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("name", ["cone", "hyperbolic", "hype", "hsa"])
def test_by_name(name, make):
    with torch.device("meta"):
        model = make(num_hidden_layers=1)
    model.set_attn_implementation(name)
    with FakeTensorMode():
        fake = make(num_hidden_layers=1)
        fake.set_attn_implementation(name)
        assert call(fake, "cpu", True) == expected(make)
    for mask in (True, False):
        assert call(model, "meta", mask) == expected(make)


@pytest.mark.parametrize("name", ["cone", "hype", "talking_heads"])
def test_flops_of_attention_are_counted(name):
    """A patched layer takes the two products of attention more than its linear layers do, of which cones leave out the
    heights.
    """
    make, config = PATCHES[name]
    n, products = 512, 4 * 2 * 4 * 512**2 * (8 + 8)  # layers · 2 · heads · N² · (d + dv)
    counts = {}
    for device in ("meta", "cpu"):
        if device == "cpu" and name == "hype" and cpu.library.core() is None:
            pytest.skip("no compiler: SDPA computes it, of which PyTorch counts nothing on a CPU")
        with torch.device(device):
            model = ha.patch_model(make(), config, mode="replace")
        if device == "cpu":
            perturb(model)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, n, dtype=torch.long, device=device))
        linear = (
            2
            * n
            * sum(
                p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n
            )
        )
        linear -= (
            2
            * n
            * sum(p.numel() for n, p in model.named_parameters() if ".hyper." in n and p.dim() == 2)
        )
        counts[device] = counter.get_total_flops() - linear
        assert 0.9 * products <= counts[device] <= 1.6 * products, (device, counts, products)


@pytest.mark.parametrize(
    "config",
    [ha.HsaConfig((8, 32), near=8), ha.HsaConfig((8, 32), "both")],
    ids=lambda config: config.tying or "key",
)
def test_flops_of_tied_attention_are_counted(config):
    """Without values as with them, forward and backward: of key tying the pairs that are computed, by kernel or not."""
    make = bert if config.tying else llama
    n, counts = 128, {}
    for device in ("meta", "cpu"):
        for tied in (False, True):
            with torch.device(device):
                model = make(num_hidden_layers=1)
                model = ha.patch_model(model, config, mode="replace") if tied else model
                None if tied else model.set_attn_implementation("eager")
            with FlopCounterMode(display=False) as counter:
                model(input_ids=torch.zeros(1, n, dtype=torch.long, device=device))[
                    0
                ].sum().backward()
            counts[device, tied] = counter.get_total_flops()
    assert counts["meta", False] == counts["cpu", False]
    saved = [counts[device, False] - counts[device, True] for device in ("meta", "cpu")]
    dense = 7 * 2 * 4 * n**2 * 8  # heads · N² · d
    assert all(0.2 * dense < x < dense for x in saved), (saved, dense)
    assert abs(saved[0] - saved[1]) < 0.15 * dense, (saved, dense)


def test_flops_of_tied_attention_are_counted_from_a_cache_too():
    model = ha.patch_model(
        llama(num_hidden_layers=1), ha.HsaConfig((8, 32), near=8), mode="replace"
    )
    ids = torch.zeros(1, 96, dtype=torch.long)
    counts = []
    for cache in (None, ha.HierarchicalCache()):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("is_causal, reach", [(True, 5 * 3), (False, 9 * 5)])
def test_flops_of_three_way_attention_are_counted(is_causal, reach):
    q, k, v, k2, v2 = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(5))
    options = dict(is_causal=is_causal, windows=(5, 3), backend="blockwise")
    with FlopCounterMode(display=False) as counter:
        ha.functional.trilinear_attention(q, k, v, k2, v2, **options).sum().backward()
    assert (
        counter.get_total_flops() == 7 * 2 * 2 * 4 * 16 * reach * 8
    )  # products · 2 · batch · heads · N · pairs · d


def test_the_gradients_of_each_row_by_torch_func():
    """Values cannot be read there either: the call must not look at whether a gate is zero."""
    model, inputs, _ = patched("llama")
    ids = inputs["input_ids"]
    added = {n: p.detach() for n, p in model.named_parameters() if ".hyper." in n}

    def loss(parameters, row):
        return (
            functional_call(model, parameters, (row[None],), {"use_cache": False})
            .logits.square()
            .mean()
        )

    rows = vmap(grad(loss), in_dims=(None, 0))(added, ids)
    for row in range(len(ids)):
        model.zero_grad()
        model(ids[row : row + 1], use_cache=False).logits.square().mean().backward()
        assert all((rows[n][row] - model.get_parameter(n).grad).abs().max() <= 1e-6 for n in added)


@pytest.mark.parametrize("mode", ["replace", "blend"])
@pytest.mark.parametrize(
    "name", ["cone", "hyperbolic", "hype", "hsa", "talking_heads", "conditional", "windowed"]
)
def test_the_gradients_of_long_rows_by_torch_func(name, mode):
    """Kernels would serve such rows, and know no transforms."""
    make, config = PATCHES[name]
    model = ha.patch_model(make(num_hidden_layers=1), config, mode=mode)
    perturb(model)
    ids = torch.randint(5, 90, (2, 50), generator=torch.Generator().manual_seed(1))
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters, row):
        return (
            functional_call(model, parameters, (row[None],), {"use_cache": False})
            .logits.square()
            .mean()
        )

    rows = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    for row in range(len(ids)):
        model.zero_grad()
        model(ids[row : row + 1], use_cache=False).logits.square().mean().backward()
        for n, p in model.named_parameters():
            want = torch.zeros_like(p) if p.grad is None else p.grad
            assert (rows[n][row] - want).abs().max() <= 1e-3 * want.abs().max() + 1e-7, n
