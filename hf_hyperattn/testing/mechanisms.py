"""The contracts of mechanisms, in tiny models of nine families with random numbers."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import transformers as hf
from torch import Tensor, nn

from model_patches.routing import STOCK_CACHE

from ..config import MechanismConfig, Mode
from ..integration import describe, lora_config, patch_model, set_backend, unpatch_model
from ..registry import get_mechanism
from .checks import Expectation, Refused, run_all, with_refusals

_SIZES: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
_SIZES |= dict(
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.3,
)
_T5 = dict(
    vocab_size=99, d_model=32, num_layers=1, num_heads=4, d_ff=40, d_kv=8, decoder_start_token_id=0
)
_GROUPED = _SIZES | dict(num_key_value_heads=2, head_dim=8)
_STACKS: dict[str, Any] = dict(
    encoder_layers=1,
    decoder_layers=1,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    encoder_attention_heads=4,
)
_STACKS |= dict(
    decoder_attention_heads=4, init_std=0.3, decoder_start_token_id=1, forced_eos_token_id=None
)

#: Tiny models by model type, each by the class and the config it is made of: grouped heads and rotary positions;
#: learned positions; a sliding window; a cap of logits; sinks; a bias of positions; both directions; two stacks with
#: cross-attention; pictures.
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("AutoModelForCausalLM", _GROUPED),
    "gpt2": ("AutoModelForCausalLM", _SIZES),
    "mistral": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    "gemma2": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    "gpt_oss": (
        "AutoModelForCausalLM",
        _GROUPED | dict(sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    ),
    "t5": ("AutoModelForSeq2SeqLM", _T5),
    "bert": ("AutoModelForMaskedLM", _SIZES),
    "bart": ("AutoModelForSeq2SeqLM", dict(vocab_size=99, d_model=32, pad_token_id=0) | _STACKS),
    "vit": ("AutoModelForImageClassification", _SIZES | dict(image_size=16, patch_size=4)),
}
#: No dropout anywhere, by the names that families have for it.
_DROPOUTS = "hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout dropout_rate"
#: Families whose queries see only what is before them.
CAUSAL = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")
#: Families whose heads share keys.
GROUPED = ("llama", "mistral", "gemma2", "gpt_oss")
#: Families of two stacks.
TWO_STACKS = ("bart", "t5")
#: What follows a head's output, by family: where it can be seen alone.
PROJECTION = {
    "llama": "model.layers.0.self_attn.o_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
}
#: One mechanism of each kind beside which every other one is patched, where that is not refused.
BESIDE = ("cone", "hype", "hsa", "head_fusion", "talking_heads")

#: Tensors by what they are.
Numbers = dict[str, Tensor]
#: How many times as far from float64 as rounding takes numbers in float32 those of another way may be.
ROUNDINGS = 8
#: What two numbers may differ by, however small they are.
SMALLEST = 1e-6


@dataclass(frozen=True)
class Check(Expectation):
    """One contract of one mechanism in one setting, to be called.

    Args:
        contract: a name out of `CONTRACTS`.
        config: the mechanism's config.
        mode: "blend" or "replace".
        family: a name out of `FAMILIES`.
        refusal: what the line by which it has to be refused says, a regular expression; None: it has to hold.

    Raises:
        ContractError: the contract is not kept, or it is refused, or it is not refused and has to be.
    """

    contract: str
    config: MechanismConfig
    mode: Mode
    family: str

    def check(self) -> None:
        contract = CONTRACTS[self.contract]
        if contract.about_learning and not added(self.patched()):
            raise Refused("nothing is added that learns")
        contract.function(self)

    def __str__(self) -> str:
        changes = ",".join(f"{k}={v}" for k, v in self.config.to_dict().items() if k != "mechanism")
        return (
            f"{self.contract}-{self.config.mechanism}({changes})-{self.mode}-{self.family}".replace(
                " ", ""
            )
        )

    def stock(self, **changes) -> Any:
        """The model, the same numbers every time."""
        return _model(self.family, **changes)

    def patch(
        self, model: Any, *configs: MechanismConfig, amount: float = 0.0, **settings: Any
    ) -> Any:
        """The model patched, with this check's config if no other is given, its added parameters moved by `amount`."""
        try:
            patch_model(model, *(configs or (self.config,)), mode=self.mode, **settings)
        except ValueError as error:
            raise Refused(str(error)) from error
        return move(model, amount)

    def patched(self, amount: float = 0.3, **changes) -> Any:
        """A new model, patched, its added parameters moved away from where they start."""
        return self.patch(self.stock(**changes), amount=amount)

    def equal(self, first: Tensor, second: Tensor, most: float, what: str) -> None:
        """Refuse outputs that are further apart than `most` anywhere, however large they are, or not finite."""
        if first.shape != second.shape:
            self.fail(
                f"{what} changes the shape", f"{tuple(first.shape)} and {tuple(second.shape)}"
            )
        apart = (first.double() - second.double()).abs().max().item()
        if not apart <= most:
            self.fail(f"{what} changes the output by {apart:.1e}, allowed: {most:g}")

    def equal_but_rounding(
        self,
        found: Numbers,
        model: nn.Module,
        way: Callable[[Any], Numbers],
        least: float,
        what: str,
    ) -> None:
        """Refuse numbers, by name, that differ from those of the plain way by more than rounding explains.

        Args:
            found: what `what` gives, in float32.
            model: in float32.
            way: gives the numbers of a model the plain way.
            least: a difference that is always allowed, relative to the largest number where that is below 1.
        """
        plain = way(model)
        limits = {
            name: max(least * min(1.0, number.abs().max().item()), SMALLEST)
            for name, number in plain.items()
        }
        if all(distance(found[name], number) <= limits[name] for name, number in plain.items()):
            return
        exact, rounding = in_float64(model, way)
        for name, number in exact.items():
            apart, most = (
                distance(found[name], number),
                max(ROUNDINGS * rounding[name], limits[name]),
            )
            if not apart <= most:
                self.fail(
                    f"{what} changes {name} by {apart:.1e} from what float64 gives, allowed: {most:.1e}"
                )


def check_mechanism(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
    refuses: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Check every contract of a mechanism; ours or that of another package, which must have been imported.

    Args:
        name: as it is registered.
        configs: settings to check; the default config where none is given.
        contracts: names out of `CONTRACTS`; None for all.
        families: names out of `FAMILIES`; None for all.
        refuses: the checks that have to be refused, by a ValueError of one line when the model is patched: regular
            expressions, of whole names of checks ("contract-mechanism(settings)-mode-family", as `str(check)` gives
            it) and of what the error says: `{".*-gemma2": "softcap"}`. "nothing is added that learns" is the kit's
            own refusal, of contracts about added parameters. Any other refusal fails.

    Returns:
        How many checks held ("held"), and how many were refused as expected ("refused").

    Raises:
        ContractError: one line that names the contract, the setting and what was found.
        ValueError: no mechanism has that name, no check has a name out of `refuses`, or all are refused.
    """
    checks = mechanism_checks(
        name, *configs, contracts=contracts, families=families, refuses=refuses
    )
    return run_all(name, checks)


def mechanism_checks(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
    refuses: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of `check_mechanism`, which see, for a test of their own each; those that have a meaning alone."""
    configs = configs or (get_mechanism(name).config(),)
    names, kinds = _known("contract", contracts, CONTRACTS), _known("family", families, FAMILIES)
    checks = [
        Check(contract, config, mode, family)
        for contract, config, mode, family in product(names, configs, get_args(Mode), kinds)
        if family in CONTRACTS[contract].families and _has_meaning(contract, name, mode)
    ]
    return with_refusals(checks, refuses)


def _has_meaning(contract: str, name: str, mode: Mode) -> bool:
    mechanism = get_mechanism(name)
    if (
        contract == "identity"
    ):  # the published operator starts elsewhere, but for what acts on heads
        return mode == "blend" or mechanism.stage in ("mixing", "fusion")
    return contract != "by_name" or (mode == "replace" and bool(mechanism.names))


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
        # of Transformers 5.17, Gemma2 takes SDPA by itself, which leaves its softcap out
        own = dict(attn_implementation="eager") if family == "gemma2" else {}
        return getattr(hf, auto).from_config(config, **own).eval()


def inputs_of(family: str) -> dict[str, Tensor]:
    """A call of a family's model: two rows, the first one padded where rows have tokens."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(5, 90, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if family in CAUSAL:
        mask[0, :3] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        }
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask} | (
        {"decoder_input_ids": ids[:, :7]} if family in TWO_STACKS else {}
    )


def output_of(model: Callable[..., Any], family: str, **call) -> Tensor:
    """The logits of a call, of tokens that are no padding."""
    dtype = getattr(model, "dtype", torch.float32)
    inputs = {
        n: t.to(dtype) if n == "pixel_values" else t for n, t in (inputs_of(family) | call).items()
    }
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
        parameter.add_(
            (torch.randn(parameter.shape, generator=generator) * amount).to(parameter.dtype)
        )
    return model


def in_float64(model: nn.Module, way: Callable[[Any], Numbers]) -> tuple[Numbers, dict[str, float]]:
    """Numbers of a model in float64, and how far from these rounding takes float32's: by their own distance, which may
    be small by luck, or by that of numbers in float64 of which every weight has moved by up to two units in float32's
    last place.
    """
    exact, near = way(_double(model)), [way(model)]
    for seed in range(3):
        moved, generator = _double(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in moved.parameters():
                step = 4 * torch.rand(weight.shape, generator=generator) - 2
                weight.mul_(1 + torch.finfo(torch.float32).eps * step)
        near.append(way(moved))
    return exact, {
        name: max(distance(numbers[name], number) for numbers in near)
        for name, number in exact.items()
    }


def _double(model: Any) -> Any:
    """A copy of a model in float64."""
    model = copy.deepcopy(model).double()
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model


def distance(first: Tensor, second: Tensor) -> float:
    """The largest difference of two tensors' numbers."""
    return (first.double() - second.double()).abs().max().item()


def added(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and parameters that patching has added."""
    return [(n, p) for n, p in model.named_parameters() if ".hyper." in n]


def facts(model: hf.PreTrainedModel) -> dict[str, object]:
    """What a model is, apart from numbers: classes, attributes, hooks, config, names in the state dict."""
    known: dict[str, object] = {
        "state dict": list(model.state_dict()),
        "config": model.config.to_dict(),
    }
    for name, module in model.named_modules():
        known[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            plain = isinstance(value, int | float | str | None)
            known[f"{name}.{key}"] = (
                value if plain else list(value) if isinstance(value, dict) else type(value)
            )
    return known


# The contracts: each raises a ContractError.


class Contract(NamedTuple):
    """What checks it, the families where it has a meaning or that tell enough, and whether it is about learning."""

    function: Callable[[Check], None]
    families: tuple[str, ...]
    about_learning: bool


#: Every contract of a mechanism, by name.
CONTRACTS: dict[str, Contract] = {}


def contract(*families: str, about_learning: bool = False) -> Callable:
    """Register a contract: for these families, or all, and for mechanisms that add parameters, or all."""

    def registered(function: Callable[[Check], None]) -> Callable[[Check], None]:
        CONTRACTS[function.__name__] = Contract(
            function, families or tuple(FAMILIES), about_learning
        )
        return function

    return registered


@contract()
def identity(check: Check) -> None:
    """A patched model starts as the model it was: skipped, computed, and with gradients."""
    stock = run(check.stock(), check.family)
    most = 1e-5 * max(
        1.0, stock.abs().max().item()
    )  # another order of sums rounds by the numbers' size
    check.equal(run(check.patched(0.0), check.family), stock, most, "patching")
    check.equal(output_of(check.patched(0.0), check.family), stock, most, "patching for training")
    computed = {"the output": run(check.patched(1e-12), check.family)}
    plain = lambda model: {"the output": run(model, check.family)}
    check.equal_but_rounding(
        computed, check.stock(), plain, most, "a mechanism that is computed at its start"
    )


@contract()
def reversal(check: Check) -> None:
    """`unpatch_model` gives back the original, whatever was learned in between."""
    model = check.stock()
    before, numbers = facts(model), copy.deepcopy(model.state_dict())
    output = run(model, check.family)
    unpatch_model(check.patch(model, amount=0.3))
    after = facts(model)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if changed:
        check.fail("unpatch_model leaves something changed", ", ".join(changed[:5]))
    if not all(torch.equal(t, numbers[n]) for n, t in model.state_dict().items()):
        check.fail("unpatch_model leaves other numbers")
    check.equal(run(model, check.family), output, 0, "patching and unpatching")


def gradients_of(model: Any, family: str, **call) -> dict[str, Any]:
    """Gradients of the added parameters, by name."""
    model.zero_grad()
    output_of(model, family, **call).float().square().mean().backward()
    return {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in added(model)}


@contract("llama", "gpt2", "bert", "vit", about_learning=True)
def learning(check: Check) -> None:
    """Every added parameter gets a finite gradient and moves in three steps."""
    model = check.patched(0.0).train()
    start = {n: p.detach().clone() for n, p in added(model)}
    optimizer = torch.optim.Adam([p for _, p in added(model)], lr=0.01)
    for _ in range(3):
        for name, slope in gradients_of(model, check.family).items():
            if slope is None or not slope.isfinite().all():
                check.fail(f"{name} gets {'no' if slope is None else 'an infinite'} gradient")
        optimizer.step()
    still = [name for name, parameter in added(model) if torch.equal(parameter, start[name])]
    if still:
        raise Refused(f"what is added does not move in three steps: {', '.join(still)}")


@contract("gpt2", "bert", about_learning=True)  # Llama's norms compute in float32, too roughly
def gradients(check: Check) -> None:
    """Gradients of added parameters are differences of the loss, in float64, along a direction of all entries."""
    model = check.patched(0.2).double()
    generator = torch.Generator().manual_seed(3)
    slopes = gradients_of(model, check.family)
    for name, parameter in added(model):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-6, -2e-6):
            parameter.data.add_(direction, alpha=step)
            losses.append(run(model, check.family).square().mean().item())
        parameter.data.add_(direction, alpha=1e-6)
        measured, slope = (losses[0] - losses[1]) / 2e-6, (slopes[name] * direction).sum().item()
        if abs(measured - slope) > 1e-4 * slopes[name].norm().item() + 1e-7:
            check.fail(
                f"along a direction the gradient of {name} is {slope:.6g}, and the loss's {measured:.6g}"
            )


@contract()
def reload(check: Check) -> None:
    """Saved and loaded by plain `from_pretrained` it gives the same numbers; the card names the mechanism."""
    model = check.patched()
    with tempfile.TemporaryDirectory() as folder:
        again = _saved_and_loaded(model, folder)
        card = Path(folder, "README.md")
        if not card.exists() or check.config.mechanism not in card.read_text():
            check.fail("save_pretrained writes no card that names the mechanism")
    check.equal(run(again, check.family), run(model, check.family), 0, "reloading")


def _saved_and_loaded(model: hf.PreTrainedModel, folder: str) -> hf.PreTrainedModel:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


@contract("llama", "bert")
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


@contract("llama", "bert")
def heads(check: Check) -> None:
    """`heads=` leaves the other heads alone."""
    model = check.stock(num_hidden_layers=1)
    before = _heads_of(model, check.family)
    check.patch(model, amount=0.5, heads=[0, 2])
    apart = (_heads_of(model, check.family) - before).abs().amax((0, 1, 3))
    if apart[[1, 3]].max() > 1e-5:
        check.fail(f"heads=[0, 2] changes other heads by {apart[[1, 3]].max():.1e}")
    if not apart[[0, 2]].min() > 1e-5:
        check.fail(f"heads=[0, 2] changes them by {apart[[0, 2]].tolist()}")


@torch.no_grad()
def _heads_of(model: nn.Module, family: str) -> Tensor:
    """[B, N, 4, d]: what the heads of the first layer hand to the projection behind them."""
    seen: list[Tensor] = []
    handle = model.get_submodule(PROJECTION[family]).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    run(model, family)
    handle.remove()
    return seen[0].unflatten(-1, (4, -1))[1:]  # the row without padding


@contract(*GROUPED)
def grouped(check: Check) -> None:
    """Keys shared by two heads each give what the same keys give repeated."""
    model, wide = check.patched(), check.patched(num_key_value_heads=4)
    numbers, shapes = model.state_dict(), {n: t.shape for n, t in wide.state_dict().items()}
    for name, tensor in numbers.items():
        axis = next(
            (i for i, (a, b) in enumerate(zip(tensor.shape, shapes[name], strict=True)) if a != b),
            None,
        )
        if (
            axis is not None
        ):  # along the first axis each key head has entries; along a later one they are summed over
            doubled = (
                tensor.unflatten(axis, (2, -1)).repeat_interleave(2, axis).flatten(axis, axis + 1)
            )
            numbers[name] = doubled if axis == 0 else doubled / 2
    wide.load_state_dict(numbers)
    check.equal(run(wide, check.family), run(model, check.family), 2e-5, "repeating shared keys")


@contract(*CAUSAL, "bert")
def padding(check: Check) -> None:
    """A padded row gives what it gives alone."""
    inputs = inputs_of(check.family)
    model, real = check.patched(), inputs["attention_mask"][0].bool()
    alone = {name: tensor[:1, real] for name, tensor in inputs.items()}
    if "position_ids" in inputs:
        alone["position_ids"] = torch.arange(8)[None]
    expected = run(model, check.family, **alone)
    check.equal(run(model, check.family)[: len(expected)], expected, 5e-5, "padding")


@contract(*CAUSAL, *TWO_STACKS)
def cached(check: Check) -> None:
    """Tokens read in chunks and one by one from a cache give what they give at once; so does generation."""
    model, inputs = check.patched(), inputs_of(check.family)
    how = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    ids = {n: t for n, t in inputs.items() if n in ("input_ids", "attention_mask")}
    for beams in (1, 3) if check.family in ("llama", "t5") else (1,):
        plain = model.generate(**ids, use_cache=False, num_beams=beams, **how)
        if not torch.equal(model.generate(**ids, use_cache=True, num_beams=beams, **how), plain):
            check.fail(
                f"generate with a cache and num_beams={beams} writes other tokens than without a cache"
            )
    if check.family in TWO_STACKS:
        return
    for cache_class in (
        hf.DynamicCache,
        lambda config: hf.StaticCache(config=config, max_cache_len=16),
    ):
        padded, whole = inputs, {"input_ids": inputs["input_ids"][1:]}
        for call in (padded, whole):
            past = cache_class(config=model.config)
            real = call.get("attention_mask", torch.ones(1, 11)).bool()
            chunks = {"the output": _by_chunks(model, call, past)[real]}
            at_once = torch.no_grad()(
                lambda model, call=call, real=real: {"the output": model(**call).logits[real]}
            )
            check.equal_but_rounding(
                chunks, model, at_once, 1e-4, f"reading by {type(past).__name__}"
            )


@torch.no_grad()
def _by_chunks(model: Any, inputs: dict[str, Tensor], past: hf.Cache) -> Tensor:
    """The logits of tokens that are read a few and one at a time, with a cache."""
    place, parts = 0, []
    for size in (5, 1, 1, 3, 1):
        call: dict[str, Any] = {n: t[:, place : place + size] for n, t in inputs.items()}
        if "attention_mask" in inputs:
            call["attention_mask"] = inputs["attention_mask"][:, : place + size]
        call[STOCK_CACHE] = past
        parts.append(model(**call, use_cache=True).logits)
        place += size
    return torch.cat(parts, 1)


@contract("llama", "bert")
def composition(check: Check) -> None:
    """Beside other mechanisms it starts as the model was and is reloaded exactly; a declared clash is refused."""
    for other in BESIDE:
        config = get_mechanism(other).config()
        stages = set(check.config.stages) & set(config.stages)
        if stages or check.config.clash(config) or config.clash(check.config):
            _refused_together(check, config)
            continue
        model = check.patch(check.stock(), check.config, config)
        if check.mode == "blend":
            check.equal(
                run(model, check.family),
                run(check.stock(), check.family),
                1e-5,
                f"patching beside {other}",
            )
        try:
            output = run(move(model, 0.2), check.family)
        except ValueError as error:
            check.fail(f"beside {other} it is refused when it runs, not when it is patched", error)
        with tempfile.TemporaryDirectory() as folder:
            again = _saved_and_loaded(model, folder)
        check.equal(run(again, check.family), output, 0, f"reloading beside {other}")


def _refused_together(check: Check, config: MechanismConfig) -> None:
    other = config.mechanism
    try:
        check.patch(check.stock(), check.config, config)
    except Refused as error:
        if not (check.config.mechanism in str(error) and other in str(error)):
            check.fail(f"the refusal beside {other} does not name both", error)
    else:
        check.fail(f"it is patched beside {other}, with which it is declared to clash")


@contract("llama", "bert")
def engines(check: Check) -> None:
    """Every engine gives what `reference` gives, and its gradients, or says that it does not serve the mechanism."""
    model = set_backend(check.patched(), "reference")
    output, slopes = (
        run(model, check.family),
        gradients_of(model, check.family) if added(model) else {},
    )
    for backend in ("blockwise", "cpu"):
        set_backend(model, backend)
        try:
            found = run(model, check.family)
        except ValueError as error:
            if f"backend={backend!r}" not in str(error):
                raise
            continue
        check.equal(found, output, 5e-4, f"backend={backend!r}")
        for name, slope in (gradients_of(model, check.family) if slopes else {}).items():
            most = 5e-3 * max(slopes[name].abs().max().item(), 1e-2)
            check.equal(slope, slopes[name], most, f"backend={backend!r}, the gradient of {name},")


@contract("llama", "bert", about_learning=True)
def compiled(check: Check) -> None:
    """`torch.compile(fullgraph=True)` gives the same numbers, forward and backward."""
    torch._dynamo.reset()
    model = check.patched(num_hidden_layers=1)
    once = torch.compile(model, fullgraph=True, backend="aot_eager")
    call = {"use_cache": False} if check.family in CAUSAL else {}
    check.equal(
        run(once, check.family, **call), run(model, check.family, **call), 1e-4, "torch.compile"
    )
    way = lambda model: gradients_of(model, check.family, **call)
    check.equal_but_rounding(way(once), model, way, 1e-5, "torch.compile")


@contract("llama", "bert")
def half(check: Check) -> None:
    """Half precision moves the output a few times as far as only rounding the parameters to it, on average; gradients
    are finite.
    """
    for dtype, most in ((torch.bfloat16, 8), (torch.float16, 15)):
        model, distances = check.patched(0.1), []
        exact = run(model, check.family)
        for other in (copy.deepcopy(model).to(dtype).float(), model.to(dtype)):
            distances.append(
                (run(other, check.family).double() - exact).square().mean().sqrt().item()
            )
        if not distances[1] <= most * distances[0]:
            check.fail(
                f"{dtype} moves the output by {distances[1]:.1e}, rounded parameters by {distances[0]:.1e}"
            )
        gradients_of(model, check.family)
        if not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
            check.fail(f"gradients are not finite in {dtype}")


@contract("llama", "bert", about_learning=True)
def checkpointing(check: Check) -> None:
    """Gradient checkpointing changes no gradient; the reentrant one, which adds in another order, by rounding alone."""
    call = {"use_cache": False} if check.family in CAUSAL else {}
    expected = check.patched().train()
    gradients_of(expected, check.family, **call)
    for reentrant, most in ((False, 0.0), (True, 1e-5)):
        model = check.patched().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gradients_of(model, check.family, **call)
        for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            first, second = (
                torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other)
            )
            check.equal(first, second, most, f"checkpointing (use_reentrant={reentrant}) of {name}")


@contract("llama", "bert", about_learning=True)
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


@contract()
def by_name(check: Check) -> None:
    """`attn_implementation=` by a name of the mechanism is patching with that name's config in its place."""
    for name, config in get_mechanism(check.config.mechanism).names.items():
        model = check.stock()
        model.set_attn_implementation(name)
        cross = get_mechanism(config.mechanism).cross_attention
        replaced = check.patch(check.stock(), config, include_cross_attention=cross)
        check.equal(
            run(model, check.family),
            run(replaced, check.family),
            1e-5,
            f"attn_implementation={name!r}",
        )


@contract("llama", "bert")
def described(check: Check) -> None:
    """`describe` says what is patched, and the config goes through JSON unchanged."""
    hosts = [h for h in describe(check.patched())["hosts"] if h["mechanisms"]]
    if not hosts or any(h["mechanisms"] != [check.config.mechanism] for h in hosts):
        check.fail("describe does not show it")
    if MechanismConfig.from_dict(check.config.to_dict()) != check.config:
        check.fail("its config is another one after to_dict and from_dict")
