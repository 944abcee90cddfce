"""The contracts that mechanisms and engines keep, as a kit: for our own, and for those of other packages.

    import hf_hyperattn as ha, my_package
    ha.testing.check_mechanism("my_score")          # every contract, in tiny random models of nine families
    ha.testing.check_engine("my_engine")            # against `reference` in float64

In pytest, one test for each contract, family and setting:

    @pytest.mark.parametrize("check", ha.testing.mechanism_checks("my_score"), ids=str)
    def test_contract(check):
        check()
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import transformers as hf
from torch import Tensor, nn

from . import functional
from .config import MechanismConfig, Mode
from .engines import Options, attention, available_engines, dot_score
from .integration import describe, lora_config, patch_model, unpatch_model
from .registry import get_mechanism

_SIZES = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
_TOKENS = dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3)
_GROUPED = _SIZES | _TOKENS | dict(num_key_value_heads=2, head_dim=8)
_GPT2 = dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
_BART = dict(vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, init_std=0.3)
_BART |= dict(decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64)
_T5 = dict(vocab_size=99, d_model=32, num_layers=1, num_heads=4, d_ff=40, d_kv=8, decoder_start_token_id=0)
_EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)

#: Tiny models by model type, each by the class and the config it is made of: grouped heads and rotary positions;
#: learned positions; a sliding window; a cap of logits; sinks; a bias of positions; both directions; two stacks with
#: cross-attention; pictures.
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("AutoModelForCausalLM", _GROUPED),
    "gpt2": ("AutoModelForCausalLM", _GPT2 | dict(initializer_range=0.3)),
    "mistral": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    "gemma2": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    "gpt_oss": ("AutoModelForCausalLM", _GROUPED | _EXPERTS | dict(sliding_window=4)),
    "t5": ("AutoModelForSeq2SeqLM", _T5),
    "bert": ("AutoModelForMaskedLM", _SIZES | _TOKENS),
    "bart": (
        "AutoModelForSeq2SeqLM",
        _BART | dict(decoder_start_token_id=1, forced_eos_token_id=None, pad_token_id=0),
    ),
    "vit": ("AutoModelForImageClassification", _SIZES | dict(image_size=16, patch_size=4)),
}
#: No dropout anywhere, by the names that families have for it.
_DROPOUTS = "hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout dropout_rate"
#: Families whose queries see only what is before them.
CAUSAL = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")
#: Families of two stacks.
TWO_STACKS = ("bart", "t5")
#: What follows a head's output, by family: where it can be seen alone.
PROJECTION = {
    "llama": "model.layers.0.self_attn.o_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
}
#: One mechanism of each kind beside which every other one is patched, where that is not refused.
BESIDE = ("cone", "hype", "hsa", "head_fusion", "talking_heads")


class ContractError(AssertionError):
    """A contract that is not kept; one line."""


@dataclass(frozen=True)
class Check:
    """One contract of one mechanism in one setting; called, it returns None, or the reason why it does not apply.

    Args:
        contract: a name out of `CONTRACTS`.
        config: the mechanism's config.
        mode: "blend" or "replace".
        family: a name out of `FAMILIES`.

    Raises:
        ContractError: the contract is not kept.
    """

    contract: str
    config: MechanismConfig
    mode: Mode
    family: str

    def __call__(self) -> str | None:
        torch.manual_seed(0)
        try:
            patch_model(self.stock(), self.config, mode=self.mode)
        except ValueError as error:
            if "\n" in str(error):
                self.fail("a refusal has more than one line", str(error))
            return str(error)
        if self.contract in LEARNED and not added(self.patched()):
            return "nothing is added that learns"
        return CONTRACTS[self.contract](self)

    def __str__(self) -> str:
        changes = ",".join(f"{k}={v}" for k, v in self.config.to_dict().items() if k != "mechanism")
        return f"{self.contract}-{self.config.mechanism}({changes})-{self.mode}-{self.family}".replace(" ", "")

    def stock(self, **changes) -> Any:
        """The model, the same numbers every time."""
        return _model(self.family, **changes)

    def patched(self, amount: float = 0.3, **changes) -> Any:
        """The patched model, its added parameters moved away from where they start."""
        return move(patch_model(self.stock(**changes), self.config, mode=self.mode), amount)

    def fail(self, what: str, found: object = "") -> None:
        raise ContractError(f"{self}: {what}{f': {found}' if found != '' else ''}")

    def equal(self, first: Tensor, second: Tensor, most: float, what: str) -> None:
        """Refuse outputs further apart than `most`, times the largest number where that is above 1; or not finite."""
        if first.shape != second.shape:
            self.fail(f"{what} changes the shape", f"{tuple(first.shape)} and {tuple(second.shape)}")
        apart = (first.double() - second.double()).abs().max().item()
        most *= max(1.0, second.abs().max().item())
        if not apart <= most:
            self.fail(f"{what} changes the output by {apart:.1e}, allowed: {most:g}")


def check_mechanism(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
) -> dict[str, int]:
    """Check every contract of a mechanism; ours or that of another package, which must have been imported.

    Args:
        name: as it is registered.
        configs: settings to check; the default config where none is given.
        contracts: names out of `CONTRACTS`; None for all.
        families: names out of `FAMILIES`; None for all.

    Returns:
        How many checks held ("held"), and how many do not apply, since the mechanism or the setting is refused there.

    Raises:
        ContractError: one line that names the contract, the setting and what was found.
        ValueError: no mechanism has that name, or none of the models takes it.
    """
    checks = mechanism_checks(name, *configs, contracts=contracts, families=families)
    reasons = [check() for check in checks]
    refused = [r for r in reasons if r is not None]
    if checks and len(refused) == len(reasons):
        raise ValueError(f"{name} is refused by every model that was tried; the first one said: {refused[0]}")
    return {"held": len(reasons) - len(refused), "do not apply": len(refused)}


def mechanism_checks(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
) -> list[Check]:
    """The checks of `check_mechanism`, which see, for a test of their own each."""
    configs = configs or (get_mechanism(name).config(),)
    names, kinds = _known("contract", contracts, CONTRACTS), _known("family", families, FAMILIES)
    return [
        Check(contract, config, mode, family)
        for contract, config, mode, family in product(names, configs, get_args(Mode), kinds)
        if family in ONLY_IN.get(contract, FAMILIES)
    ]


def _known(what: str, chosen: Iterable[str] | None, known: dict) -> list[str]:
    chosen = list(known) if chosen is None else list(chosen)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{what} {name!r} is unknown; allowed: {', '.join(known)}")
    return chosen


# Models, what they are called with, and what is compared.


def _model(family: str, **changes) -> hf.PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto, sizes = FAMILIES[family]
        config = hf.AutoConfig.for_model(family, **sizes | changes)
        for name in _DROPOUTS.split():
            if hasattr(config, name):
                setattr(config, name, 0.0)
        return getattr(hf, auto).from_config(config).eval()


def inputs_of(family: str) -> dict[str, Tensor]:
    """A call of a family's model: two rows, the first one padded where rows have tokens."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(5, 90, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if family in CAUSAL:
        mask[0, :3] = 0
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask} | (
        {"decoder_input_ids": ids[:, :7]} if family in TWO_STACKS else {}
    )


def output_of(model: Callable[..., Any], family: str, **call) -> Tensor:
    """The logits of a call, of tokens that are no padding."""
    inputs = inputs_of(family) | call
    logits = model(**inputs).logits
    mask = inputs.get("attention_mask")
    return logits if mask is None or family in TWO_STACKS else logits[mask.bool()]


@torch.no_grad()
def run(model: Callable[..., Any], family: str, **call) -> Tensor:
    """`output_of` without gradients."""
    return output_of(model, family, **call)


@torch.no_grad()
def move(model: nn.Module, amount: float = 0.3) -> nn.Module:
    """Move every added parameter from where it stands, by the same numbers in every run."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in added(model):
        parameter.add_((torch.randn(parameter.shape, generator=generator) * amount).to(parameter.dtype))
    return model


def added(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and parameters that patching has added."""
    return [(n, p) for n, p in model.named_parameters() if ".hyper." in n]


def facts(model: hf.PreTrainedModel) -> dict[str, object]:
    """What a model is, apart from numbers: classes, attributes, hooks, config, names in the state dict."""
    known: dict[str, object] = {"state dict": list(model.state_dict()), "config": model.config.to_dict()}
    for name, module in model.named_modules():
        known[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            plain = isinstance(value, int | float | str | None)
            known[f"{name}.{key}"] = value if plain else list(value) if isinstance(value, dict) else type(value)
    return known


# The contracts of mechanisms: each raises a ContractError, or returns why it has no meaning in that setting.


def identity(check: Check) -> str | None:
    """A patched model starts as the model it was: skipped, computed, and with gradients."""
    if check.mode == "replace" and not _starts_as_identity(check):
        return "mode='replace' is the published operator, which starts elsewhere"
    stock = run(check.stock(), check.family)
    check.equal(run(check.patched(0.0), check.family), stock, 1e-5, "patching")
    check.equal(output_of(check.patched(0.0), check.family), stock, 1e-5, "patching for training")
    check.equal(run(check.patched(1e-12), check.family), stock, 1e-5, "a mechanism that is computed at its start")
    return None


def _starts_as_identity(check: Check) -> bool:
    """Whether replacing, too, starts as the model that it was: what acts on heads has no other beginning."""
    return get_mechanism(check.config.mechanism).stage in ("mixing", "fusion")


def reversal(check: Check) -> None:
    """`unpatch_model` gives back the original, whatever was learned in between."""
    model = check.stock()
    before, numbers = facts(model), copy.deepcopy(model.state_dict())
    output = run(model, check.family)
    unpatch_model(move(patch_model(model, check.config, mode=check.mode)))
    after = facts(model)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if changed:
        check.fail("unpatch_model leaves something changed", ", ".join(changed[:5]))
    if not all(torch.equal(t, numbers[n]) for n, t in model.state_dict().items()):
        check.fail("unpatch_model leaves other numbers")
    check.equal(run(model, check.family), output, 0, "patching and unpatching")


def learning(check: Check) -> None:
    """Every added parameter gets a finite gradient, and in every layer some move in three steps."""
    model = check.patched(0.0).train()
    start = {n: p.detach().clone() for n, p in added(model)}
    optimizer = torch.optim.Adam([p for _, p in added(model)], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        output_of(model, check.family).square().mean().backward()
        for name, parameter in added(model):
            if parameter.grad is None or not parameter.grad.isfinite().all():
                check.fail(f"{name} gets {'no' if parameter.grad is None else 'an infinite'} gradient")
        optimizer.step()
    layer = lambda name: name.split(".hyper.")[0]
    moved = {layer(name) for name, parameter in added(model) if not torch.equal(parameter, start[name])}
    still = sorted({layer(name) for name in start} - moved)
    if still:
        check.fail("no added parameter moves in three steps", ", ".join(still[:3]))


def gradients(check: Check) -> None:
    """Gradients of added parameters are differences of the loss, in float64."""
    model = check.patched(0.2).double()
    loss = lambda: output_of(model, check.family).square().mean()
    names, parameters = zip(*added(model), strict=True)
    slopes = torch.autograd.grad(loss(), parameters)
    for name, parameter, slope in zip(names, parameters, slopes, strict=True):
        place = slope.abs().reshape(-1).argmax()  # the entry that decides
        flat = parameter.data.view(-1)
        with torch.no_grad():
            start, losses = flat[place].item(), []
            for step in (1e-6, -1e-6):
                flat[place] = start + step
                losses.append(loss().item())
            flat[place] = start
        measured, found = (losses[0] - losses[1]) / 2e-6, slope.reshape(-1)[place].item()
        if abs(measured - found) > 1e-4 * abs(measured) + 1e-7:
            check.fail(f"the gradient of {name} is {found:.6g}, and the loss changes by {measured:.6g}")


def reload(check: Check) -> None:
    """Saved and loaded by plain `from_pretrained` it gives the same numbers; the card names the mechanism."""
    model = check.patched()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        check.equal(run(type(model).from_pretrained(folder), check.family), run(model, check.family), 0, "reloading")
        card = Path(folder, "README.md")
        if not card.exists() or check.config.mechanism not in card.read_text():
            check.fail("save_pretrained writes no card that names the mechanism")


def copies(check: Check) -> None:
    """A deep copy, a pickled model and a state dict carry the mechanism."""
    model, buffer = check.patched(), io.BytesIO()
    output = run(model, check.family)
    check.equal(run(copy.deepcopy(model), check.family), output, 0, "a deep copy")
    check.equal(run(pickle.loads(pickle.dumps(model)), check.family), output, 0, "pickling")
    torch.save(model.state_dict(), buffer)
    other = check.patched(0.0)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    check.equal(run(other, check.family), output, 0, "a state dict")


def heads(check: Check) -> str | None:
    """`heads=` leaves the other heads alone; a layer that cannot is refused."""
    model = check.stock(num_hidden_layers=1)
    before = _heads_of(model, check.family)
    try:
        move(patch_model(model, check.config, mode=check.mode, heads=[0, 2]), 0.5)
    except ValueError as error:
        return str(error)
    apart = (_heads_of(model, check.family) - before).abs().amax((0, 1, 3))
    if apart[[1, 3]].max() > 1e-5:
        check.fail(f"heads=[0, 2] changes other heads by {apart[[1, 3]].max():.1e}")
    if not apart[[0, 2]].max() > 1e-5:
        check.fail("heads=[0, 2] changes nothing")
    return None


@torch.no_grad()
def _heads_of(model: nn.Module, family: str) -> Tensor:
    """[B, N, 4, d]: what the heads of the first layer hand to the projection behind them."""
    seen: list[Tensor] = []
    handle = model.get_submodule(PROJECTION[family]).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(model, family)
    handle.remove()
    return seen[0].unflatten(-1, (4, -1))[1:]  # the row without padding


def grouped(check: Check) -> str | None:
    """Keys shared by two heads each give what the same keys give repeated."""
    if check.family not in ("llama", "mistral", "gemma2", "gpt_oss"):
        return "its heads share no keys"
    model, wide = check.patched(), check.patched(num_key_value_heads=4)
    numbers, shapes = model.state_dict(), {n: t.shape for n, t in wide.state_dict().items()}
    for name, tensor in numbers.items():
        if tensor.shape != shapes[name]:  # along the first axis, by head
            by_head = 2 if ".hyper." not in name else tensor.shape[0]
            if shapes[name] != (2 * tensor.shape[0], *tensor.shape[1:]):
                return f"it has another {name.split('.hyper.')[-1]} for other numbers of key heads"
            split = tensor.unflatten(0, (by_head, -1))
            numbers[name] = split.repeat_interleave(2, 0).flatten(0, 1)
    wide.load_state_dict(numbers)
    check.equal(run(wide, check.family), run(model, check.family), 2e-5, "repeating shared keys")
    return None


def padding(check: Check) -> str | None:
    """A padded row gives what it gives alone."""
    inputs = inputs_of(check.family)
    if "attention_mask" not in inputs or check.family in TWO_STACKS:
        return "its rows have no padding of their own"
    model, real = check.patched(), inputs["attention_mask"][0].bool()
    alone = run(model, check.family, **{n: t[:1, real] for n, t in inputs.items()} | (
        {"position_ids": torch.arange(8)[None]} if "position_ids" in inputs else {}))  # fmt: skip
    check.equal(run(model, check.family)[: len(alone)], alone, 5e-5, "padding")
    return None


def cached(check: Check) -> str | None:
    """Tokens read in chunks and one by one from a cache give what they give at once; so does generation."""
    if check.family not in (*CAUSAL, *TWO_STACKS):
        return "it does not generate"
    model, inputs = check.patched(), inputs_of(check.family)
    how = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    ids = {n: t for n, t in inputs.items() if n in ("input_ids", "attention_mask")}
    plain = model.generate(**ids, use_cache=False, **how)
    if not torch.equal(model.generate(**ids, use_cache=True, **how), plain):
        check.fail("generate with a cache writes other tokens than without")
    if check.family in TWO_STACKS:
        return None
    for cache_class in (hf.DynamicCache, lambda config: hf.StaticCache(config=config, max_cache_len=16)):
        past, place, parts = cache_class(config=model.config), 0, []
        for size in (5, 1, 1, 4):
            part = slice(place, place + size)
            call = {n: t[:, part] for n, t in inputs.items()}
            call["attention_mask"] = inputs["attention_mask"][:, : place + size]
            with torch.no_grad():
                parts.append(model(**call, past_key_values=past, use_cache=True).logits)
            place += size
        chunks = torch.cat(parts, 1)[inputs["attention_mask"].bool()]
        check.equal(chunks, run(model, check.family), 5e-5, f"reading by {type(past).__name__}")
    return None


def composition(check: Check) -> str | None:
    """Beside mechanisms of other stages it starts as the model was and comes back exactly, or both are named."""
    tried = 0
    for other in BESIDE:
        config = get_mechanism(other).config()
        try:
            model = patch_model(check.stock(), check.config, config, mode=check.mode)
        except ValueError as error:
            text = str(error)
            if "\n" in text or not (check.config.mechanism in text and (other in text or "stage" in text)):
                check.fail(f"the refusal beside {other} does not name both in one line", text)
            continue
        tried += 1
        if check.mode == "blend":
            check.equal(run(model, check.family), run(check.stock(), check.family), 1e-5, f"patching beside {other}")
        try:
            output = run(move(model, 0.2), check.family)
        except ValueError as error:
            check.fail(f"beside {other} it is refused when it runs, not when it is patched", error)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder)
        check.equal(run(again, check.family), output, 0, f"reloading beside {other}")
    return None if tried else "no other mechanism has a meaning beside it"


def compiled(check: Check) -> None:
    """`torch.compile(fullgraph=True)` gives the same numbers, forward and backward."""
    torch._dynamo.reset()
    model = check.patched(num_hidden_layers=1) if check.family != "bart" else check.patched()
    once = torch.compile(model, fullgraph=True, backend="aot_eager")
    call = {"use_cache": False} if check.family in CAUSAL else {}
    check.equal(run(once, check.family, **call), run(model, check.family, **call), 5e-5, "torch.compile")
    slopes = []
    for one in (once, model):
        model.zero_grad()
        output_of(one, check.family, **call).square().mean().backward()
        slopes.append(torch.cat([p.grad.flatten() for _, p in added(model)]))
    check.equal(slopes[0], slopes[1], 1e-4 * (1 + slopes[1].abs().max().item()), "torch.compile in training")


def half(check: Check) -> None:
    """In bfloat16 the numbers are those of float32 as far as they go, and gradients are finite."""
    model = check.patched(0.1)
    exact = run(model, check.family)
    model = model.bfloat16()
    call = {n: t.bfloat16() for n, t in inputs_of(check.family).items() if t.is_floating_point()}
    check.equal(run(model, check.family, **call), exact, 0.3 * exact.abs().max().item(), "bfloat16")
    output_of(model, check.family, **call).float().square().mean().backward()
    if not all(p.grad.isfinite().all() for _, p in added(model)):
        check.fail("gradients are not finite in bfloat16")


def checkpointing(check: Check) -> None:
    """Gradient checkpointing changes no gradient."""
    slopes = []
    for on in (False, True):
        torch.manual_seed(0)
        model = check.patched().train()
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        call = {"use_cache": False} if check.family in CAUSAL else {}
        output_of(model, check.family, **call).square().mean().backward()
        slopes.append(torch.cat([p.grad.flatten() for _, p in added(model)]))
    check.equal(slopes[0], slopes[1], 0, "gradient checkpointing")


def adapter(check: Check) -> None:
    """LoRA beside it learns and is saved with it; switched off it is the model before; loaded it is the same."""
    from peft import PeftModel, get_peft_model

    base = check.patched(0.0)
    before = run(base, check.family)
    model = get_peft_model(base, lora_config(base, r=2))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        output_of(model, check.family).square().mean().backward()
        optimizer.step()
    output = run(model.eval(), check.family)
    with model.disable_adapter():
        check.equal(run(model, check.family), before, 1e-6, "disable_adapter")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(check.patched(0.0), folder).eval()
    check.equal(run(again, check.family), output, 1e-6, "an adapter that is saved and loaded")


def by_name(check: Check) -> str | None:
    """`attn_implementation=` by a name of the mechanism is patching with that name's config in its place."""
    names = get_mechanism(check.config.mechanism).names
    if not names or check.mode == "blend":
        return "it has no name" if not names else "names stand for mode='replace'"
    for name, config in names.items():
        model = check.stock()
        model.set_attn_implementation(name)
        cross = get_mechanism(config.mechanism).cross_attention
        try:
            replaced = patch_model(check.stock(), config, mode="replace", include_cross_attention=cross)
        except ValueError as error:
            return str(error)
        check.equal(run(model, check.family), run(replaced, check.family), 1e-5, f"attn_implementation={name!r}")
    return None


def described(check: Check) -> None:
    """`describe` says what is patched, and the config goes through JSON unchanged."""
    hosts = [h for h in describe(check.patched())["hosts"] if h["mechanisms"]]
    if not hosts or any(h["mechanisms"] != [check.config.mechanism] for h in hosts):
        check.fail("describe does not show it")
    if MechanismConfig.from_dict(check.config.to_dict()) != check.config:
        check.fail("its config is another one after to_dict and from_dict")


#: Every contract of a mechanism, by name.
CONTRACTS: dict[str, Callable[[Check], str | None]] = {
    f.__name__: f
    for f in (
        identity, reversal, learning, gradients, reload, copies, heads, grouped, padding, cached, composition, compiled,
        half, checkpointing, adapter, by_name, described,
    )
}  # fmt: skip
#: Those that are about added parameters.
LEARNED = ("learning", "gradients", "compiled", "checkpointing", "adapter")
#: Where two families tell enough: Llama's norms compute in float32, where differences of the loss are too rough.
ONLY_IN = {"gradients": ("gpt2", "bert"), "learning": ("llama", "gpt2", "bert", "vit")} | dict.fromkeys(
    ("copies", "heads", "composition", "compiled", "half", "checkpointing", "adapter", "described"),
    ("llama", "bert"),
)


# The contract of engines: what `reference` says in float64.


@dataclass(frozen=True)
class EngineCheck:
    """One score under one kind of call, by one engine; called, it compares outputs and gradients with `reference`.

    Args:
        engine: a name out of `available_engines()`.
        score: a name out of `SCORES`.
        call: a name out of `CALLS`.
        dtype: of queries, keys and values.
    """

    engine: str
    score: str
    call: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.engine}-{self.score}-{self.call}-{self.dtype}".replace("torch.", "")

    def __call__(self) -> None:
        found, exact = self._run(self.engine, self.dtype), self._run("reference", torch.float64)
        limits = {torch.float64: (1e-9, 1e-7), torch.float32: (2e-4, 2e-3), torch.bfloat16: (3e-2, 6e-2)}[self.dtype]
        largest = max(1.0, *(t.abs().max().item() for t in exact[1:]))
        for place, (one, other) in enumerate(zip(found, exact, strict=True)):
            limit = limits[place > 0] * (largest if place else 1.0)
            apart = (one.double() - other).abs().max().item()
            if not apart <= limit:
                what = ("output", "gradient of query", "gradient of key", "gradient of value")[place]
                raise ContractError(f"{self}: the {what} is {apart:.1e} off, allowed: {limit:.1e}")

    def _run(self, engine: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(self.dtype).to(dtype).requires_grad_() for t in points()]
        options = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
                   for n, t in CALLS[self.call].items()}  # fmt: skip
        output = SCORES[self.score](*leaves, **options, enable_gqa=True, backend=engine)
        pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return [output.detach(), *torch.autograd.grad((output.double() * pull).sum(), leaves)]


@cache
def points() -> tuple[Tensor, Tensor, Tensor]:
    """Queries [2, 4, 37, 8], keys and values [2, 2, 45, 8] in float64: random, round, equal and nearly equal ones."""
    g = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(2, h, n, 8, generator=g, dtype=torch.float64) for h, n in ((4, 37), (2, 45), (2, 45))
    )
    query[:, :, :8] = torch.randint(-2, 3, (2, 4, 8, 8), generator=g).double()
    key[:, :, :8] = query[:, ::2, :8]
    key[:, :, 8:16] = query[:, ::2, 8:16] + 1e-2 * torch.randn(2, 2, 8, 8, generator=g, dtype=torch.float64)
    query[..., -1][:, :, 3], key[:, :, 20] = 1.0, 0.0
    return query.bfloat16().double(), key.bfloat16().double(), value.bfloat16().double()


_MASK = torch.rand(2, 1, 37, 45, generator=torch.Generator().manual_seed(8)) < 0.7
#: Calls by what they ask for.
CALLS: dict[str, dict] = {
    "full": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": _MASK},
    "masked and causal": {"attn_mask": _MASK, "is_causal": True},
    "additive": {"attn_mask": torch.where(_MASK, 0.5, -torch.inf).double()},
}
#: Scores by name: a function each with the arguments of `scaled_dot_product_attention`.
SCORES: dict[str, Callable[..., Tensor]] = {
    "dot product": lambda *a, **k: _dot(*a, **k),
    "umbral": functional.cone_attention,
    "penumbral": lambda *a, **k: functional.cone_attention(*a, **k, variant="penumbral"),
    "penumbral heights": lambda *a, **k: functional.cone_attention(*a, **k, variant="penumbral", squared=False),
    "geodesic": lambda *a, **k: functional.hyperbolic_attention(*a, **k, aggregation="mean"),
    "midpoint": lambda *a, **k: functional.hyperbolic_attention(*a, **k, distance="squared_lorentz"),
    "hype": lambda *a, **k: functional.hype_attention(*a, **k, mu=0.1, tau=2.0),
}


def _dot(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False, *, backend):
    options = Options(mask=attn_mask, is_causal=is_causal)
    return attention(dot_score(query, key), value, options, backend=backend)[0]


def check_engine(name: str, dtypes: Iterable[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16)) -> int:
    """Check that an engine agrees with `reference` in float64, forward and backward; returns how many checks held.

    Args:
        name: as it is registered. What it passes on to another engine counts as its own; what it refuses by a
            ValueError of one line does not count.
        dtypes: of queries, keys and values.

    Raises:
        ContractError: one line that names the score, the call and how far it is off.
        ValueError: no engine has that name, or it refuses every score.
    """
    checks, refused = engine_checks(name, dtypes), []
    for check in checks:
        try:
            check()
        except ValueError as error:
            if "\n" in str(error):
                raise ContractError(f"{check}: a refusal has more than one line: {error}") from error
            refused.append(str(error))
    if len(refused) == len(checks):
        raise ValueError(f"{name} refuses every score that was tried; it said: {refused[0]}")
    return len(checks) - len(refused)


def engine_checks(
    name: str, dtypes: Iterable[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16)
) -> list[EngineCheck]:
    """The checks of `check_engine`, which see, for a test of their own each."""
    if name not in available_engines():
        raise ValueError(f"backend={name!r} is unknown; allowed: {', '.join(available_engines())}")
    return [EngineCheck(name, score, call, dtype) for score, call, dtype in product(SCORES, CALLS, dtypes)]
