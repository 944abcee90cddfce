"""Roads of a model in memory: copies, dtypes, devices, names set, outputs asked for, other models beside it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import accelerate
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.base import Plan

from .cases import Case, inputs_of, logits
from .outcome import gap
from .road import road

GROUP = "In memory"
patched = lambda case: case.how == "patch"
causal = lambda case: case.causal
hears = lambda case: case.mechanism == "hsa"
LAYERS = 3


@road("deepcopy", GROUP, fast=True)
def deepcopied(case, folder):
    model = case.model()
    other = copy.deepcopy(model)
    yield logits(other), case.logits
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    yield logits(model), case.logits


@road("pickle", GROUP, fast=True)
def pickled(case, folder):
    yield logits(pickle.loads(pickle.dumps(case.model()))), case.logits


@road("torch.save of the module", GROUP)
def torch_saved(case, folder):
    torch.save(case.model(), folder / "model.pt")
    yield logits(torch.load(folder / "model.pt", weights_only=False)), case.logits


@road("float64", GROUP, fast=True, tolerance=1e-4)
def double(case, folder):
    yield logits(case.model().double()), case.logits


@road("bfloat16 and back", GROUP)
def through_bfloat16(case, folder):
    expected = case.model()
    for tensor in [*expected.parameters(), *expected.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16().float()
    yield logits(case.model().to(torch.bfloat16).float()), logits(expected)


@road("float16", GROUP, tolerance=1e-2)
def half(case, folder):
    """Where HSA chooses blocks by their scores, rounding may choose others for a token, 4e-2 off: it is left out."""
    found, rounded = logits(case.model().half()), logits(case.model().half().float())
    yield bool(found.isfinite().all()), True
    kept = (found - rounded).abs().amax(1).argsort()[: -1 if hears(case) else None]
    yield found[kept], rounded[kept]


@road("functional_call", GROUP)
def functional_call(case, folder):
    model, inputs = case.model(), inputs_of()
    state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    with torch.no_grad():
        found = torch.func.functional_call(model, state, kwargs=inputs, tie_weights=True).logits
    yield found[inputs["attention_mask"].bool()].float(), case.logits


def meta_inputs() -> dict:
    """Without a mask, which Transformers would look into."""
    return {"input_ids": inputs_of()["input_ids"].to("meta")}


@road("meta device", GROUP, fast=True)
def meta(case, folder):
    with torch.no_grad():
        found, want = (
            case.model().to("meta")(**meta_inputs()).logits,
            case.model()(**inputs_of()).logits,
        )
    yield found.is_meta and found.shape == want.shape and found.dtype == want.dtype, True


@road("built on the meta device", GROUP)
def meta_built(case, folder):
    config = AutoConfig.from_pretrained(case.folder())
    with torch.device("meta"):
        model = case.auto.from_config(config)
        with torch.no_grad():
            found = model(**meta_inputs()).logits
    yield found.is_meta and found.shape == (2, 20, 99), True


@road("FakeTensorMode", GROUP)
def fake(case, folder):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    config = AutoConfig.from_pretrained(case.folder())
    with FakeTensorMode(), torch.no_grad():
        found = case.auto.from_config(config)(
            **{n: torch.ones(2, 20, dtype=torch.long) for n in inputs_of()}
        )
        yield isinstance(found.logits, FakeTensor) and found.logits.shape == (2, 20, 99), True


def flops(model, inputs: dict) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


@road("FLOP counter", GROUP)
def flop_counter(case, folder):
    """Counts on both devices differ by what the engines do: of SDPA's kernel on the CPU nothing is counted."""
    inputs = {"input_ids": inputs_of()["input_ids"]}
    counted, stock = flops(case.model(), inputs), flops(case.stock(), inputs)
    yield counted > 0.5 * stock, True
    missing = flops(case.stock().to("meta"), meta_inputs()) - stock
    yield (
        abs(flops(case.model().to("meta"), meta_inputs()) - counted) <= missing + 0.1 * counted,
        True,
    )


@road('set_attn_implementation("eager")', GROUP, fast=True)
def set_eager(case, folder):
    model = case.model()
    model.set_attn_implementation("eager")
    yield logits(model), case.logits


@road('set_attn_implementation("sdpa")', GROUP, fast=True)
def set_sdpa(case, folder):
    model = case.model()
    model.set_attn_implementation("sdpa")
    yield logits(model), case.logits


@road('set_attn_implementation("eager"), save, load', GROUP)
def set_and_saved(case, folder):
    model = case.model()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), case.logits


@road(
    "set_attn_implementation to another name of ours",
    GROUP,
    control=False,
    applies=lambda case: (
        case.mechanism != "hat"
    ),  # an architecture of its own, with any attention inside
)
def set_other(case, folder):
    model = case.model()
    model.set_attn_implementation("hype" if case.mechanism != "hype" else "cone")
    yield logits(model), case.logits


def attentions(model, **options) -> tuple:
    with torch.no_grad():
        found = model.eval()(**inputs_of(), **options)
    return found.logits[inputs_of()["attention_mask"].bool()], found.attentions


def whole(entries) -> bool:
    """One entry for every layer, none missing."""
    return entries is not None and len(entries) == LAYERS and all(e is not None for e in entries)


def prepared(case: Case):
    """The model; one without an attention of ours runs eager, since sdpa has no weights to give."""
    model = case.model()
    if without_ours(case):
        model.set_attn_implementation("eager")
    return model


def without_ours(case: Case) -> bool:
    """HAT is an architecture of its own, with any attention inside."""
    return case.how == "stock" or case.mechanism == "hat"


@road("output_attentions=True", GROUP, fast=True)
def output_attentions(case, folder):
    model = prepared(case)
    for learning in (True, False):
        model.requires_grad_(learning)
        found, entries = attentions(model, output_attentions=True)
        yield whole(entries), True
        yield found, case.logits


@road('output_attentions=True after set_attn_implementation("eager")', GROUP, fast=True)
def output_attentions_eager(case, folder):
    model = case.model()
    model.set_attn_implementation("eager")
    found, entries = attentions(model, output_attentions=True)
    yield found, case.logits
    yield whole(entries), True
    if case.how == "patch":  # the first layer has no mechanism
        stock = case.stock()
        stock.set_attn_implementation("eager")
        real = inputs_of()["attention_mask"].bool()
        first = lambda e: e[0].transpose(1, 2)[real]
        yield first(entries), first(attentions(stock, output_attentions=True)[1])


@road("config.output_attentions = True, save, load", GROUP)
def output_attentions_config(case, folder):
    model = prepared(case)
    model.config.output_attentions = True
    found, entries = attentions(model)
    yield found, case.logits
    yield whole(entries), True
    model.save_pretrained(folder)
    options = {"attn_implementation": "eager"} if without_ours(case) else {}
    found, entries = attentions(case.auto.from_pretrained(folder, **options))
    yield found, case.logits
    yield whole(entries), True


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model.train()
    model.zero_grad()
    model(**inputs_of(), labels=inputs_of()["input_ids"]).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def checkpointed(case: Case, reentrant: bool):
    model = case.model()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = gradients(model)
    yield plain.keys() == again.keys(), True
    for name in plain:
        yield again[name], plain[name]
    yield logits(model), case.logits


@road("gradient checkpointing", GROUP)
def checkpointing(case, folder):
    yield from checkpointed(case, False)


@road("gradient checkpointing, reentrant", GROUP)
def reentrant(case, folder):
    yield from checkpointed(case, True)


@road("offload to the CPU (Accelerate)", GROUP)
def cpu_offload(case, folder):
    yield logits(accelerate.cpu_offload(case.model(), torch.device("cpu"))), case.logits


@road("offload to the disk (Accelerate)", GROUP)
def disk_offload(case, folder):
    yield (
        logits(accelerate.disk_offload(case.model(), str(folder), torch.device("cpu"))),
        case.logits,
    )


@road("device_map with layers on the disk", GROUP)
def offloaded_at_load(case, folder):
    modules = dict(case.model().named_modules())
    stack = next(
        n for n, m in modules.items() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS
    )
    leaves = [n for n, m in modules.items() if not any(m.children())]
    leaves += [
        n for n, _ in case.model().named_parameters() if n.rpartition(".")[0] not in leaves
    ]  # BERT's head
    leaves = [n for n in leaves if not n.startswith(f"{stack}.")]
    places = {n: "cpu" for n in leaves} | {
        f"{stack}.{i}": ("cpu", "disk", "cpu")[i] for i in range(LAYERS)
    }
    model = case.auto.from_pretrained(case.folder(), device_map=places, offload_folder=str(folder))
    yield logits(model), case.logits


@road("another model in the process", GROUP, fast=True)
def beside(case, folder):
    model, stock = case.model(), case.stock()
    plain = logits(stock)
    other = case.stock()
    ha.patch_model(
        other, ha.TalkingHeadsConfig() if case.mechanism != "talking_heads" else ha.ConeConfig()
    )
    other.set_attn_implementation("hf_hyperattn")
    logits(other)
    yield logits(model), case.logits
    ha.unpatch_model(other)
    yield logits(model), case.logits
    yield logits(stock), plain
    yield logits(case.stock()), plain
    yield logits(other), plain


@road("a config shared by two models", GROUP, fast=True)
def shared_config(case, folder):
    model = case.model()
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    yield logits(other), case.logits
    yield logits(model), case.logits


@road("a copied config for another model", GROUP)
def copied_config(case, folder):
    model = case.model()
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    yield logits(other), case.logits


@road("threads", GROUP)
def threads(case, folder):
    model = case.model()
    batches = [inputs_of(seed=i, length=12 + i) for i in range(6)]
    alone = [logits(model, b) for b in batches]
    with ThreadPoolExecutor(3) as pool:
        yield from zip(pool.map(lambda b: logits(model, b), batches), alone, strict=True)


@road("another length", GROUP)
def other_length(case, folder):
    """The fast engines against the reference, at lengths that no record speaks of."""
    plain = Plan.run
    for length in (7, 61):
        inputs = inputs_of(length)
        found = logits(case.model(), inputs)
        Plan.run = lambda plan, backend="auto", weights=False: plain(plan, "reference", weights)
        try:
            yield found, logits(case.model(), inputs)
        finally:
            Plan.run = plain


@road("settings of `hyperattn inject` at another length", GROUP, applies=hears, control=False)
def settings_elsewhere(case, folder):
    """Settings that were chosen for 8 tokens, on 20: the warning is that quality was not measured there."""
    made_for = dataclasses.replace(case.config, tuned_length=8)
    model = dataclasses.replace(case, config=made_for).model()
    for length, expected in ((8, True), (20, False)):
        inputs = inputs_of(length)
        same = gap(logits(model, inputs), logits(case.model(), inputs)) < 1e-5
        yield same and expected, True


@road("resize_token_embeddings", GROUP)
def resized(case, folder):
    model = case.model()
    model.resize_token_embeddings(110)
    yield logits(model)[:, :99], case.logits
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder))[:, :99], case.logits


def generated(model, **options):
    """Logits of 4 new tokens."""
    model.eval()
    found = model.generate(
        **inputs_of(9),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(found.logits), found.sequences


@road("generate with a cache", GROUP, applies=causal)
def cached(case, folder):
    model = case.model()
    (found, ids), (want, others) = generated(model), generated(model, use_cache=False)
    yield found, want
    yield torch.equal(ids, others), True


@road("generate with a static cache", GROUP, applies=causal)
def static_cache(case, folder):
    model = case.model()
    options = dict(cache_implementation="static", disable_compile=True)
    yield generated(model, **options)[0], generated(model, use_cache=False)[0]


@road("generate with an assistant", GROUP, applies=causal)
def assisted(case, folder):
    model = case.model()
    row = {n: t[1:] for n, t in inputs_of(9).items()}
    plain, other = (
        model.generate(**row, max_new_tokens=6, do_sample=False, **o)
        for o in ({}, {"assistant_model": case.stock()})
    )
    yield torch.equal(plain, other), True


@road("generate with guidance_scale", GROUP, applies=causal)
def guided(case, folder):
    """The pass without the prompt, which runs inside the call with it, is that of the model by itself."""
    model, inputs = case.model(), inputs_of(9)
    options = dict(
        max_new_tokens=1, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    hierarchy = {"hierarchy": trees(length=9)} if hears(case) else {}
    found = model.generate(**inputs, **hierarchy, guidance_scale=1.5, **options).scores[0]
    plain = model.generate(**inputs, **hierarchy, **options).scores[0].log_softmax(-1)
    alone = model.generate(inputs["input_ids"][:, -1:], **options).scores[0].log_softmax(-1)
    yield found, 1.5 * plain - 0.5 * alone


@road("continuous batching", GROUP, applies=causal)
def batched(case, folder):
    model = case.model()
    rows = [r[m.bool()].tolist() for r, m in zip(*inputs_of(9).values())]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    small = ContinuousBatchingConfig(
        num_blocks=4, max_batch_tokens=64
    )  # else the cache fills the memory
    found = model.generate_batch(
        rows, generation_config=config, continuous_batching_config=small, progress_bar=False
    )
    tokens = [v.generated_tokens for v in found.values()]
    alone = [
        model.generate(torch.tensor([r]), max_new_tokens=4, min_new_tokens=4, do_sample=False)[
            0, len(r) :
        ]
        for r in rows
    ]
    yield sorted(tokens) == sorted(a.tolist() for a in alone), True


@road("unpatch_model", GROUP, fast=True, control=False)
def unpatched(case, folder):
    model = ha.unpatch_model(case.model())
    yield list(model.state_dict()) == list(case.stock().state_dict()), True
    yield logits(model), logits(case.stock())


@road("unpatch_model after a reload", GROUP, control=False)
def unpatched_later(case, folder):
    model = ha.unpatch_model(case.auto.from_pretrained(case.folder()))
    yield list(model.state_dict()) == list(case.stock().state_dict()), True
    yield logits(model), logits(case.stock())


def trees(rows: int = 2, length: int = 20) -> ha.Hierarchy:
    return ha.Hierarchy.from_segment_ids((torch.arange(length) // 5).expand(rows, -1))


@road("hierarchy of another model's call", GROUP, applies=hears, control=False, fast=True)
def overheard(case, folder):
    """A model called in a hook of another computes what it does alone; so does a compiled one."""
    model, teacher, seen = case.model(), case.model(), []
    model.register_forward_hook(lambda *_: seen.append(logits(teacher)))
    layer = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    layer.register_forward_pre_hook(lambda *_: seen.append(logits(teacher)))
    with torch.no_grad():
        outer = model(**inputs_of(), hierarchy=trees()).logits
    yield (
        (outer[inputs_of()["attention_mask"].bool()] - case.logits).abs().max().item() > 1e-3,
        True,
    )
    for found in seen:
        yield found, case.logits


@road("hierarchy of another thread's call", GROUP, applies=hears, control=False)
def overheard_thread(case, folder):
    """A compiled model in one thread, while another thread runs a model with a hierarchy."""
    torch._dynamo.reset()
    model, quiet = case.model(), torch.compile(case.model(), backend="eager")
    first = []
    layer = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    with ThreadPoolExecutor(1) as pool:
        layer.register_forward_pre_hook(
            lambda *_: first.append(pool.submit(logits, quiet).result())
        )
        with torch.no_grad():
            model(**inputs_of(), hierarchy=trees())
    for found in first:
        yield found, case.logits
