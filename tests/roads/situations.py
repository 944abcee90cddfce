"""Roads of everyday use: other defaults, foreign attention, packed texts, chats, pruned caches, hooks."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_hyperattn as ha

from .cases import LAYERS, Case, inputs_of, logits, state_file
from .road import road
from .running import causal, gradients, patched

GROUP = "Situations"
#: The name that the foreign attention function of these roads is registered by.
FOREIGN = "foreign_softmax1"


def put_into(case: Case, model: nn.Module) -> nn.Module:
    """Put the mechanism of a case into a stock model that a road has prepared.

    Args:
        case: A case that is patched or used by name.
        model: Its stock model, changed in place.
    """
    if case.how == "name":
        if case.config is not None:
            model.config.hyperattn = ha.HyperAttnConfig([case.config]).to_dict()
        model.set_attn_implementation(case.name)
    if case.how == "patch":
        ha.patch_model(model, case.config, layers=LAYERS)
        # Not strict: a mechanism may have other parameters in layers that a road has made something else.
        model.load_state_dict(torch.load(state_file(case)), strict=False)
    return model.eval()


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention layers of Llama and GPT-2, in order."""
    return [m for m in model.modules() if type(m).__name__ in ("LlamaAttention", "GPT2Attention")]


def patched_or_named(case: Case) -> bool:
    return case.how in ("patch", "name", "stock")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Change torch's default dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare_under_default(case: Case, dtype: torch.dtype):
    """A float32 model computes the same, gradients included, whatever the default dtype is."""
    model = case.model()
    expected = gradients(model)
    with default_dtype(dtype):
        found = gradients(model)
        yield logits(model), case.logits
    yield found.keys() == expected.keys(), True
    for name, gradient in expected.items():
        yield found[name], gradient


@road("default dtype float64", GROUP, fast=True)
def default_float64(case, folder):
    yield from compare_under_default(case, torch.float64)


@road("default dtype bfloat16", GROUP, fast=True)
def default_bfloat16(case, folder):
    yield from compare_under_default(case, torch.bfloat16)


class Composed(PreTrainedModel):
    """A model that is composed of a finished one, as EncoderDecoderModel is: it initialises what is new."""

    _supports_sdpa = True

    def __init__(self, part: PreTrainedModel):
        super().__init__(part.config)
        self.part = part
        self.post_init()

    def forward(self, **inputs):
        return self.part(**inputs)


@road("a part of a composed model", GROUP, fast=True)
def composed(case, folder):
    model = case.model()
    yield logits(Composed(model)), case.logits
    yield logits(model), case.logits


@road("init_weights", GROUP, fast=True)
def initialised_again(case, folder):
    model = case.model()
    model.init_weights()
    yield logits(model), case.logits


def compute_softmax1(module, query, key, value, attention_mask, scaling=None, **keywords):
    """Softmax with one more key, whose logit and value are zero."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
        1 + scores.shape[-1] - scores.shape[-2]
    )
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < -1e4
    scores = scores.masked_fill(hidden, float("-inf"))
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    weights = scores.softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), weights


@road(
    "a foreign attention function, then the mechanism",
    GROUP,
    fast=True,
    control=False,
    applies=patched,
)
def foreign_before(case, folder):
    """At the start the model and its gradients are those of the foreign function."""
    AttentionInterface.register(FOREIGN, compute_softmax1)
    stock = case.stock()
    stock.set_attn_implementation(FOREIGN)
    expected, wanted = logits(stock), gradients(stock)
    model = case.stock()
    model.set_attn_implementation(FOREIGN)
    ha.patch_model(model, case.config, layers=LAYERS)
    yield logits(model), expected
    found = gradients(model)
    for name, gradient in wanted.items():
        yield found[name], gradient


@road(
    "the mechanism, then a foreign attention function",
    GROUP,
    fast=True,
    control=False,
    applies=patched,
)
def foreign_after(case, folder):
    AttentionInterface.register(FOREIGN, compute_softmax1)
    model = case.model()
    model.set_attn_implementation(FOREIGN)
    yield logits(model), case.logits


def pass_through(forward):
    """A wrapper with the signature of Transformers' own attention functions, which passes arguments by position."""

    def wrapper(module, query, key, value, attention_mask=None, dropout=0.0, **keywords):
        return forward(module, query, key, value, attention_mask, dropout, **keywords)

    return wrapper


@road("attention functions wrapped by another library", GROUP, fast=True)
def wrapped_functions(case, folder):
    model = case.model()
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        for name, function in functions.items():
            ALL_ATTENTION_FUNCTIONS[name] = pass_through(function)
        yield logits(model), case.logits
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]


def forget_attention(layer: nn.Module) -> None:
    """Replace the forward of an attention layer by one that asks no attention function."""
    layer.forward = lambda hidden_states, *_, **__: (hidden_states, None)


@road(
    "an attention forward that was replaced before",
    GROUP,
    fast=True,
    control=False,
    applies=patched_or_named,
)
def replaced_before(case, folder):
    model = case.stock()
    forget_attention(attention_layers(model)[1])
    yield logits(put_into(case, model)), case.logits


@road(
    "an attention forward that is replaced later",
    GROUP,
    fast=True,
    control=False,
    applies=patched_or_named,
)
def replaced_later(case, folder):
    model = case.model()
    forget_attention(attention_layers(model)[1])
    yield logits(model), case.logits


@road(
    "a key of attn_implementation that no part has",
    GROUP,
    fast=True,
    applies=lambda case: case.how == "name",
)
def strange_key(case, folder):
    model = case.stock()
    if case.config is not None:
        model.config.hyperattn = ha.HyperAttnConfig([case.config]).to_dict()
    model.set_attn_implementation({"txt_config": case.name or "eager"})
    yield logits(model), case.logits


@torch.no_grad()
def logits_alone(model: nn.Module, ids: Tensor) -> Tensor:
    return model.eval()(ids, use_cache=False).logits[0]


@road("packed texts", GROUP, fast=True, applies=causal)
def packed_texts(case, folder):
    """Two texts in a row, told apart by position_ids that begin again."""
    model, ids = case.model(), inputs_of()["input_ids"][1:]
    places = torch.cat([torch.arange(7), torch.arange(13)])[None]
    with torch.no_grad():
        found = model(ids, position_ids=places, use_cache=False).logits[0]
    yield found, torch.cat([logits_alone(model, ids[:, :7]), logits_alone(model, ids[:, 7:])])


def prefix_mask(prefix: int, length: int) -> Tensor:
    """Additive [1, 1, length, length]: everybody sees the prefix, and otherwise no later token."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:, :prefix] = True
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


def compare_steps(model: nn.Module, prefix: int = 6, length: int = 12):
    """A prompt that sees all of itself and steps with a cache, against one call with the same mask."""
    ids, cache = inputs_of()["input_ids"][1:, :length], DynamicCache()
    found = []
    with torch.no_grad():
        for start, stop in [(0, prefix), *((i, i + 1) for i in range(prefix, length))]:
            mask = prefix_mask(prefix, stop)[:, :, start:]
            found.append(
                model(ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits
            )
        expected = model(ids, attention_mask=prefix_mask(prefix, length), use_cache=False).logits
    yield torch.cat(found, 1), expected


@road("a prefix mask", GROUP, fast=True, applies=causal)
def prefix_masks(case, folder):
    yield from compare_steps(case.model())


@road(
    "a prefix mask, layers that are not causal",
    GROUP,
    fast=True,
    applies=lambda c: causal(c) and patched_or_named(c),
)
def prefix_language_model(case, folder):
    """PaliGemma's text layers say is_causal=False, and the mask says the rest."""
    model = case.stock()
    for layer in attention_layers(model):
        layer.is_causal = False
    yield from compare_steps(put_into(case, model))


@torch.no_grad()
def continue_chat(
    model: nn.Module, ids: Tensor, cache: DynamicCache, start: int, stop: int
) -> Tensor:
    return model(ids[:, start:stop], past_key_values=cache).logits


@road("interleaved chats", GROUP, fast=True, applies=causal)
def interleaved_chats(case, folder):
    """Eight conversations in turn on one model, each with a cache of its own."""
    model = case.model()
    texts = [inputs_of(seed=seed)["input_ids"][1:] for seed in range(8)]
    cuts = [0, 9, 10, 11, 15, 16]
    turns = list(zip(cuts[:-1], cuts[1:], strict=True))

    def talk(ids: Tensor) -> Tensor:
        cache = DynamicCache()
        return torch.cat([continue_chat(model, ids, cache, *turn) for turn in turns], 1)

    alone = [talk(ids) for ids in texts]
    caches, found = [DynamicCache() for _ in texts], [[] for _ in texts]
    for turn in turns:
        for ids, cache, parts in zip(texts, caches, found, strict=True):
            parts.append(continue_chat(model, ids, cache, *turn))
    for parts, expected in zip(found, alone, strict=True):
        yield torch.cat(parts, 1), expected
    for ids, expected in zip(texts, alone, strict=True):
        yield expected[0], logits_alone(model, ids[:, : cuts[-1]])


@road("threads that generate", GROUP, applies=causal)
def generating_threads(case, folder):
    model = case.model()
    texts = [inputs_of(9 + seed, seed=seed)["input_ids"][1:] for seed in range(6)]
    generate = lambda ids: model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    alone = [generate(ids) for ids in texts]
    with ThreadPoolExecutor(6) as pool:
        for found, expected in zip(pool.map(generate, texts), alone, strict=True):
            yield torch.equal(found, expected), True


@road("a cache that was pruned in the middle", GROUP, fast=True, applies=causal)
def pruned_cache(case, folder):
    """Keys 5 to 7 of 16 are dropped; the next token says by position_ids where it stands."""
    model, ids, cache = case.model(), inputs_of()["input_ids"][1:], DynamicCache()
    kept = torch.tensor([i for i in range(16) if not 5 <= i < 8])
    with torch.no_grad():
        model(ids[:, :16], past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        found = model(
            ids[:, 16:17], past_key_values=cache, position_ids=torch.tensor([[16]])
        ).logits
        seen = torch.ones(17, 17, dtype=torch.bool).tril()
        seen[16, 5:8] = False
        mask = torch.zeros(1, 1, 17, 17).masked_fill(~seen, torch.finfo(torch.float32).min)
        try:
            expected = model(ids[:, :17], attention_mask=mask, use_cache=False).logits[:, -1:]
        except (
            ValueError
        ):  # A mechanism that cannot say what is right has to refuse the pruned cache too.
            expected = torch.full_like(found, float("nan"))
    yield found, expected


def change_input(module, arguments, keywords):
    """A forward pre-hook that changes the hidden states an attention layer gets."""
    if arguments:
        return (arguments[0] * 1.5 + 0.1, *arguments[1:]), keywords
    return arguments, keywords | {"hidden_states": keywords["hidden_states"] * 1.5 + 0.1}


def hook_attention(model: nn.Module) -> nn.Module:
    for layer in attention_layers(model):
        layer.register_forward_pre_hook(change_input, with_kwargs=True)
    return model


@road(
    "hooks before and after", GROUP, fast=True, applies=lambda c: causal(c) and patched_or_named(c)
)
def hooked(case, folder):
    """A hook on attention layers acts as one on the norms before them does, registered early or late."""
    model = case.model()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("input_layernorm", "ln_1"):
            module.register_forward_hook(lambda m, i, output: output * 1.5 + 0.1)
    expected = logits(model)
    yield logits(hook_attention(case.model())), expected
    yield logits(put_into(case, hook_attention(case.stock()))), expected
