"""Check the contracts of mechanisms in tiny random models of nine families.

Here you learn what every mechanism must do: start as the original model, learn, save, and work with
    caches and engines.
"""

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
from ..config.registry import get_mechanism
from ..integration import describe, lora_config, patch_model, set_backend, unpatch_model
from .checks import Expectation, Refused, expect_refusals, run_checks

# An initializer range of 0.3, not the usual 0.02: otherwise attention in so small a model is almost
# uniform, and errors in the logits hardly show.
_SIZES: dict[str, Any] = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
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
    decoder_attention_heads=4,
    init_std=0.3,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)

#: The auto class and the config of a tiny model, by model type.
FAMILIES: dict[str, tuple[str, dict]] = {
    # Grouped heads and rotary positions.
    "llama": ("AutoModelForCausalLM", _GROUPED),
    # Learned positions.
    "gpt2": ("AutoModelForCausalLM", _SIZES),
    # A sliding window.
    "mistral": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    # A softcap.
    "gemma2": ("AutoModelForCausalLM", _GROUPED | dict(sliding_window=4)),
    # Sinks.
    "gpt_oss": (
        "AutoModelForCausalLM",
        _GROUPED | dict(sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    ),
    # A position bias, and cross-attention.
    "t5": ("AutoModelForSeq2SeqLM", _T5),
    # Bidirectional attention.
    "bert": ("AutoModelForMaskedLM", _SIZES),
    # Cross-attention.
    "bart": ("AutoModelForSeq2SeqLM", dict(vocab_size=99, d_model=32, pad_token_id=0) | _STACKS),
    # Images.
    "vit": ("AutoModelForImageClassification", _SIZES | dict(image_size=16, patch_size=4)),
}
#: Config fields for dropout in all families. They are set to 0.
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "dropout_rate",
)
#: Families with causal attention.
CAUSAL = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")
#: Families whose query heads share keys.
GROUPED = ("llama", "mistral", "gemma2", "gpt_oss")
#: Families with an encoder and a decoder.
TWO_STACKS = ("bart", "t5")
#: The output projection of the first layer. Its input is the output of each head by itself.
OUTPUT_PROJECTIONS = {
    "llama": "model.layers.0.self_attn.o_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
}
#: One mechanism of each kind. The contract `composition` combines each with the mechanism.
COMPANIONS = ("cone", "hype", "hsa", "head_fusion", "talking_heads")

#: Tensors by name, such as an output or the gradients of parameters.
Numbers = dict[str, Tensor]
#: Allowed error of a way of computing, relative to the rounding error of the plain way in float32.
ROUNDING_FACTOR = 8
#: Difference that is always allowed between two numbers.
ALWAYS_ALLOWED = 1e-6


@dataclass(frozen=True)
class Check(Expectation):
    """One contract of one mechanism in one setting. Call the object to check it.

    Args:
        contract: A name from `CONTRACTS`.
        config: The mechanism's config.
        mode: "blend" or "replace".
        family: A name from `FAMILIES`.
        refusal: Regular expression for the error with which the setting must be refused. None: the
            contract must hold.

    Raises:
        ContractError: The contract is broken, or the setting is refused unexpectedly, or an
            expected refusal is missing.
    """

    contract: str
    config: MechanismConfig
    mode: Mode
    family: str

    def check(self) -> None:
        """Check the contract; raise ContractError or Refused."""
        contract = CONTRACTS[self.contract]
        if contract.about_learning and not list_added(self.make_patched_model()):
            raise Refused("nothing is added that learns")
        contract.function(self)

    def __str__(self) -> str:
        changes = ",".join(f"{k}={v}" for k, v in self.config.to_dict().items() if k != "mechanism")
        return (
            f"{self.contract}-{self.config.mechanism}({changes})-{self.mode}-{self.family}".replace(
                " ", ""
            )
        )

    def make_stock_model(self, **changes) -> Any:
        """Return the original model, with the same numbers every time."""
        return _make_model(self.family, **changes)

    def apply_patch(
        self, model: Any, *configs: MechanismConfig, amount: float = 0.0, **settings: Any
    ) -> Any:
        """Patch the model and move its added parameters.

        Args:
            model: The model.
            configs: Configs of the mechanisms. None given: the check's own config.
            amount: Standard deviation of the move.
            settings: Passed to `patch_model`.

        Raises:
            Refused: `patch_model` raised ValueError.
        """
        try:
            patch_model(model, *(configs or (self.config,)), mode=self.mode, **settings)
        except ValueError as error:
            raise Refused(str(error)) from error
        return move_parameters(model, amount)

    def make_patched_model(self, amount: float = 0.3, **changes) -> Any:
        """Return a new patched model, its added parameters moved from their start."""
        return self.apply_patch(self.make_stock_model(**changes), amount=amount)

    def require_equal(self, first: Tensor, second: Tensor, most: float, what: str) -> None:
        """Fail if two outputs differ anywhere by more than `most`, or are not finite."""
        if first.shape != second.shape:
            self.fail(
                f"{what} changes the shape", f"{tuple(first.shape)} and {tuple(second.shape)}"
            )
        apart = measure_distance(first, second)
        # `not ... <=` instead of `>`: it also catches NaN.
        if not apart <= most:
            self.fail(f"{what} changes the output by {apart:.1e}, allowed: {most:g}")

    def require_equal_but_rounding(
        self,
        found: Numbers,
        model: nn.Module,
        way: Callable[[Any], Numbers],
        least: float,
        what: str,
    ) -> None:
        """Fail if numbers differ from the plain way by more than rounding explains.

        Args:
            found: Numbers in float32, computed in the way that is checked.
            model: The model in float32.
            way: Returns the numbers of a model in the plain way.
            least: Difference that is always allowed. It is relative to the largest number if that
                is below 1.
            what: Name of the way that is checked, for the error.
        """
        plain = way(model)
        limits = {
            name: max(least * min(1.0, number.abs().max().item()), ALWAYS_ALLOWED)
            for name, number in plain.items()
        }
        # Most checks end here: computing in float64, several times, takes long.
        if all(
            measure_distance(found[name], number) <= limits[name] for name, number in plain.items()
        ):
            return
        exact, rounding = compute_in_float64(model, way)
        for name, number in exact.items():
            apart = measure_distance(found[name], number)
            most = max(ROUNDING_FACTOR * rounding[name], limits[name])
            if not apart <= most:
                self.fail(
                    f"{what} changes {name} by {apart:.1e} from what float64 gives, "
                    f"allowed: {most:.1e}"
                )


def check_mechanism(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
    refuses: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Check every contract of a mechanism.

    The mechanism may belong to another package, which must be imported first.

    Args:
        name: Registered name of the mechanism.
        configs: Configs to check. None given: the default config.
        contracts: Names from `CONTRACTS`. None: all.
        families: Names from `FAMILIES`. None: all.
        refuses: Expected refusals, such as `{".*-gemma2": "softcap"}`. The key is a regular
            expression for whole names of checks: "contract-mechanism(settings)-mode-family", as
            `str(check)` returns. The value is a regular expression for the one-line ValueError that
            patching raises. Contracts about added parameters refuse mechanisms without any by
            "nothing is added that learns". Any other refusal fails.

    Returns:
        Number of checks that held ("held"), and of checks that were refused as expected
        ("refused").

    Raises:
        ContractError: One line that names the contract, the setting and the finding.
        ValueError: No mechanism has that name, no check has a name from `refuses`, or all checks
            are refused.
    """
    checks = mechanism_checks(
        name, *configs, contracts=contracts, families=families, refuses=refuses
    )
    return run_checks(name, checks)


def mechanism_checks(
    name: str,
    *configs: MechanismConfig,
    contracts: Iterable[str] | None = None,
    families: Iterable[str] | None = None,
    refuses: Mapping[str, str] | None = None,
) -> list[Check]:
    """Return the checks of `check_mechanism`, each for a test of its own.

    Args:
        name, configs, contracts, families, refuses: As in `check_mechanism`.

    Returns:
        One callable for each contract, config, mode and family, except for combinations without a
        meaning.

    Raises:
        ValueError: No mechanism has that name, or no check has a name from `refuses`.
    """
    configs = configs or (get_mechanism(name).config(),)
    names = _check_names("contract", contracts, CONTRACTS)
    kinds = _check_names("family", families, FAMILIES)
    checks = [
        Check(contract=contract, config=config, mode=mode, family=family)
        for contract, config, mode, family in product(names, configs, get_args(Mode), kinds)
        if family in CONTRACTS[contract].families and _is_meaningful(contract, name, mode)
    ]
    return expect_refusals(checks, refuses)


def _is_meaningful(contract: str, name: str, mode: Mode) -> bool:
    """Return whether a contract says anything about a mechanism in this mode."""
    mechanism = get_mechanism(name)
    if contract == "identity":
        # In mode "replace" only mechanisms that act on heads start as the original model. Others
        # start as published.
        return mode == "blend" or mechanism.stage in ("mixing", "fusion")
    return contract != "by_name" or (mode == "replace" and bool(mechanism.names))


def _check_names(what: str, chosen: Iterable[str] | None, known: dict) -> list[str]:
    """Return the chosen names, or all if None; raise ValueError for an unknown name."""
    chosen = list(known) if chosen is None else list(chosen)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{what} {name!r} is unknown; allowed: {', '.join(known)}")
    return chosen


# Models, their inputs, and the numbers that are compared.


def _make_model(family: str, **changes) -> hf.PreTrainedModel:
    """Return a tiny random model; `changes` override its config."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto, sizes = FAMILIES[family]
        config = hf.AutoConfig.for_model(family, **sizes | changes)
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        # In Transformers 5.17, Gemma2 uses SDPA by default, which ignores its softcap.
        own = dict(attn_implementation="eager") if family == "gemma2" else {}
        return getattr(hf, auto).from_config(config, **own).eval()


def make_inputs(family: str) -> dict[str, Tensor]:
    """Return inputs of two rows; the first is padded if rows are tokens."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(5, 90, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if family in CAUSAL:
        # Causal models are padded on the left, as for generation.
        mask[0, :3] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        }
    mask[0, -3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family in TWO_STACKS:
        inputs["decoder_input_ids"] = ids[:, :7]
    return inputs


def compute_output(model: Callable[..., Any], family: str, **call) -> Tensor:
    """Return the logits of a call without the rows of padding."""
    dtype = getattr(model, "dtype", torch.float32)
    inputs = {
        n: t.to(dtype) if n == "pixel_values" else t
        for n, t in (make_inputs(family) | call).items()
    }
    logits = model(**inputs).logits
    mask = inputs.get("attention_mask")
    return logits if mask is None or family in TWO_STACKS else logits[mask.bool()]


@torch.no_grad()
def run_model(model: Callable[..., Any], family: str, **call) -> Tensor:
    """Call `compute_output` without gradients."""
    return compute_output(model, family, **call)


@torch.no_grad()
def move_parameters(model: nn.Module, amount: float = 0.3) -> nn.Module:
    """Add random numbers to every added parameter, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in list_added(model):
        parameter.add_(
            (torch.randn(parameter.shape, generator=generator) * amount).to(parameter.dtype)
        )
    return model


def compute_in_float64(
    model: nn.Module, way: Callable[[Any], Numbers]
) -> tuple[Numbers, dict[str, float]]:
    """Compute numbers in float64, and estimate the rounding error of float32.

    Args:
        model: The model in float32.
        way: Returns the numbers of a model.

    Returns:
        The numbers in float64, and the estimated error of each.
    """
    exact, near = way(_copy_to_float64(model)), [way(model)]
    # The distance of the float32 numbers may be small by luck. So three more samples follow:
    # float64 numbers after every weight has moved by up to two units in the last place of float32.
    for seed in range(3):
        moved = _copy_to_float64(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in moved.parameters():
                step = 4 * torch.rand(weight.shape, generator=generator) - 2
                weight.mul_(1 + torch.finfo(torch.float32).eps * step)
        near.append(way(moved))
    return exact, {
        name: max(measure_distance(numbers[name], number) for numbers in near)
        for name, number in exact.items()
    }


def _copy_to_float64(model: Any) -> Any:
    """Return a copy of a model in float64."""
    model = copy.deepcopy(model).double()
    if hasattr(model.config, "num_local_experts"):
        # Grouped matrix products do not support float64.
        model.set_experts_implementation("eager")
    return model


def measure_distance(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference between two tensors."""
    return (first.double() - second.double()).abs().max().item()


def list_added(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and parameters that patching has added."""
    return [(n, p) for n, p in model.named_parameters() if ".hyper." in n]


def collect_facts(model: hf.PreTrainedModel) -> dict[str, object]:
    """Return everything about a model except tensor values.

    These are classes, attributes, hooks, the config, and the names in the state dict.
    """
    known: dict[str, object] = {
        "state dict": list(model.state_dict()),
        "config": model.config.to_dict(),
    }
    for name, module in model.named_modules():
        known[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, dict):
                value = list(value)
            elif not isinstance(value, int | float | str | None):
                value = type(value)
            known[f"{name}.{key}"] = value
    return known


# The contracts. Each one raises ContractError, or Refused.


class Contract(NamedTuple):
    """A registered contract.

    Args:
        function: Checks the contract.
        families: Families in which the contract is checked.
        about_learning: Whether it applies only to mechanisms that add parameters.
    """

    function: Callable[[Check], None]
    families: tuple[str, ...]
    about_learning: bool


#: All contracts of mechanisms, by name.
CONTRACTS: dict[str, Contract] = {}


def register_contract(*families: str, about_learning: bool = False) -> Callable:
    """Register the decorated function as a contract under its name.

    Args:
        families: Families in which it is checked. None given: all.
        about_learning: Whether it applies only to mechanisms that add parameters.
    """

    def register(function: Callable[[Check], None]) -> Callable[[Check], None]:
        CONTRACTS[function.__name__] = Contract(
            function, families or tuple(FAMILIES), about_learning
        )
        return function

    return register


@register_contract()
def identity(check: Check) -> None:
    """A patched model starts as the original model."""
    stock = run_model(check.make_stock_model(), check.family)
    # Sums in another order round in proportion to the size of the numbers.
    most = 1e-5 * max(1.0, stock.abs().max().item())
    # Three ways: a mechanism may be skipped at its start, but not in training, and not once a
    # parameter has moved.
    check.require_equal(
        run_model(check.make_patched_model(0.0), check.family), stock, most, "patching"
    )
    check.require_equal(
        compute_output(check.make_patched_model(0.0), check.family),
        stock,
        most,
        "patching for training",
    )
    computed = {"the output": run_model(check.make_patched_model(1e-12), check.family)}
    plain = lambda model: {"the output": run_model(model, check.family)}
    check.require_equal_but_rounding(
        computed, check.make_stock_model(), plain, most, "a mechanism that is computed at its start"
    )


@register_contract()
def reversal(check: Check) -> None:
    """`unpatch_model` restores the original model, whatever was learned in between."""
    model = check.make_stock_model()
    before, numbers = collect_facts(model), copy.deepcopy(model.state_dict())
    output = run_model(model, check.family)
    unpatch_model(check.apply_patch(model, amount=0.3))
    after = collect_facts(model)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if changed:
        check.fail("unpatch_model leaves something changed", ", ".join(changed[:5]))
    if not all(torch.equal(t, numbers[n]) for n, t in model.state_dict().items()):
        check.fail("unpatch_model leaves other numbers")
    check.require_equal(run_model(model, check.family), output, 0, "patching and unpatching")


def compute_gradients(model: Any, family: str, **call) -> dict[str, Any]:
    """Return the gradients of the added parameters, by name."""
    model.zero_grad()
    compute_output(model, family, **call).float().square().mean().backward()
    # torch.compile puts its prefix before all names.
    return {
        name.removeprefix("_orig_mod."): parameter.grad for name, parameter in list_added(model)
    }


@register_contract("llama", "gpt2", "bert", "vit", about_learning=True)
def learning(check: Check) -> None:
    """Every added parameter gets a finite gradient and moves in three steps."""
    model = check.make_patched_model(0.0).train()
    start = {n: p.detach().clone() for n, p in list_added(model)}
    optimizer = torch.optim.Adam([p for _, p in list_added(model)], lr=0.01)
    for _ in range(3):
        for name, slope in compute_gradients(model, check.family).items():
            if slope is None or not slope.isfinite().all():
                check.fail(f"{name} gets {'no' if slope is None else 'an infinite'} gradient")
        optimizer.step()
    still = [name for name, parameter in list_added(model) if torch.equal(parameter, start[name])]
    if still:
        raise Refused(f"what is added does not move in three steps: {', '.join(still)}")


# Not for Llama: its norms compute in float32, too roughly for differences.
@register_contract("gpt2", "bert", about_learning=True)
def gradients(check: Check) -> None:
    """Gradients of added parameters agree with differences of the loss in float64."""
    model = check.make_patched_model(0.2).double()
    generator = torch.Generator().manual_seed(3)
    slopes = compute_gradients(model, check.family)
    for name, parameter in list_added(model):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        # A central difference: one step forward, two back, then one forward to the start.
        for step in (1e-6, -2e-6):
            parameter.data.add_(direction, alpha=step)
            losses.append(run_model(model, check.family).square().mean().item())
        parameter.data.add_(direction, alpha=1e-6)
        measured = (losses[0] - losses[1]) / 2e-6
        slope = (slopes[name] * direction).sum().item()
        if abs(measured - slope) > 1e-4 * slopes[name].norm().item() + 1e-7:
            check.fail(
                f"along a direction the gradient of {name} is {slope:.6g}, "
                f"and the loss's {measured:.6g}"
            )


@register_contract()
def reload(check: Check) -> None:
    """A model that is saved and loaded by `from_pretrained` returns the same numbers.

    Its model card names the mechanism.
    """
    model = check.make_patched_model()
    with tempfile.TemporaryDirectory() as folder:
        again = _save_and_load(model, folder)
        card = Path(folder, "README.md")
        if not card.exists() or check.config.mechanism not in card.read_text():
            check.fail("save_pretrained writes no card that names the mechanism")
    check.require_equal(
        run_model(again, check.family), run_model(model, check.family), 0, "reloading"
    )


def _save_and_load(model: hf.PreTrainedModel, folder: str) -> hf.PreTrainedModel:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


@register_contract("llama", "bert")
def copies(check: Check) -> None:
    """A deep copy, a pickled model and a state dict keep the mechanism."""
    model, buffer = check.make_patched_model(), io.BytesIO()
    output = run_model(model, check.family)
    check.require_equal(run_model(copy.deepcopy(model), check.family), output, 0, "a deep copy")
    check.require_equal(
        run_model(pickle.loads(pickle.dumps(model)), check.family), output, 0, "pickling"
    )
    torch.save(model.state_dict(), buffer)
    other = check.make_patched_model(0.0)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    check.require_equal(run_model(other, check.family), output, 0, "a state dict")


@register_contract("llama", "bert")
def heads(check: Check) -> None:
    """`heads=` changes these heads and no others."""
    model = check.make_stock_model(num_hidden_layers=1)
    before = _read_heads(model, check.family)
    check.apply_patch(model, amount=0.5, heads=[0, 2])
    apart = (_read_heads(model, check.family) - before).abs().amax((0, 1, 3))
    if apart[[1, 3]].max() > 1e-5:
        check.fail(f"heads=[0, 2] changes other heads by {apart[[1, 3]].max():.1e}")
    if not apart[[0, 2]].min() > 1e-5:
        check.fail(f"heads=[0, 2] changes them by {apart[[0, 2]].tolist()}")


@torch.no_grad()
def _read_heads(model: nn.Module, family: str) -> Tensor:
    """Return the outputs of the first layer's heads, [1, N, 4, d]."""
    seen: list[Tensor] = []
    handle = model.get_submodule(OUTPUT_PROJECTIONS[family]).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    run_model(model, family)
    handle.remove()
    # Only the row without padding.
    return seen[0].unflatten(-1, (4, -1))[1:]


@register_contract(*GROUPED)
def grouped(check: Check) -> None:
    """Keys that two query heads share give the same output as keys that are repeated."""
    model, wide = check.make_patched_model(), check.make_patched_model(num_key_value_heads=4)
    numbers, shapes = model.state_dict(), {n: t.shape for n, t in wide.state_dict().items()}
    for name, tensor in numbers.items():
        axis = next(
            (i for i, (a, b) in enumerate(zip(tensor.shape, shapes[name], strict=True)) if a != b),
            None,
        )
        if axis is not None:
            # Along the first axis every key head has its own entries. A later axis is summed over,
            # so entries are halved.
            doubled = (
                tensor.unflatten(axis, (2, -1)).repeat_interleave(2, axis).flatten(axis, axis + 1)
            )
            numbers[name] = doubled if axis == 0 else doubled / 2
    wide.load_state_dict(numbers)
    check.require_equal(
        run_model(wide, check.family), run_model(model, check.family), 2e-5, "repeating shared keys"
    )


@register_contract(*CAUSAL, "bert")
def padding(check: Check) -> None:
    """A padded row gives the same output as the row without padding."""
    inputs = make_inputs(check.family)
    model, real = check.make_patched_model(), inputs["attention_mask"][0].bool()
    alone = {name: tensor[:1, real] for name, tensor in inputs.items()}
    if "position_ids" in inputs:
        alone["position_ids"] = torch.arange(8)[None]
    expected = run_model(model, check.family, **alone)
    check.require_equal(run_model(model, check.family)[: len(expected)], expected, 5e-5, "padding")


@register_contract(*CAUSAL, *TWO_STACKS)
def cached(check: Check) -> None:
    """Reading with a cache, by chunk or token, gives the same as reading at once.

    Generation with a cache writes the same tokens as without.
    """
    model, inputs = check.make_patched_model(), make_inputs(check.family)
    how = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    ids = {n: t for n, t in inputs.items() if n in ("input_ids", "attention_mask")}
    for beams in (1, 3) if check.family in ("llama", "t5") else (1,):
        plain = model.generate(**ids, use_cache=False, num_beams=beams, **how)
        if not torch.equal(model.generate(**ids, use_cache=True, num_beams=beams, **how), plain):
            check.fail(
                f"generate with a cache and num_beams={beams} writes other tokens "
                "than without a cache"
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
            chunks = {"the output": _read_in_chunks(model, call, past)[real]}
            at_once = torch.no_grad()(
                lambda model, call=call, real=real: {"the output": model(**call).logits[real]}
            )
            check.require_equal_but_rounding(
                chunks, model, at_once, 1e-4, f"reading by {type(past).__name__}"
            )


@torch.no_grad()
def _read_in_chunks(model: Any, inputs: dict[str, Tensor], past: hf.Cache) -> Tensor:
    """Return the logits of tokens read with a cache, several or one at a time."""
    place, parts = 0, []
    for size in (5, 1, 1, 3, 1):
        call: dict[str, Any] = {n: t[:, place : place + size] for n, t in inputs.items()}
        if "attention_mask" in inputs:
            call["attention_mask"] = inputs["attention_mask"][:, : place + size]
        call[STOCK_CACHE] = past
        parts.append(model(**call, use_cache=True).logits)
        place += size
    return torch.cat(parts, 1)


@register_contract("llama", "bert")
def composition(check: Check) -> None:
    """With other mechanisms, a model starts as the original and is reloaded exactly.

    A declared clash is refused.
    """
    for other in COMPANIONS:
        config = get_mechanism(other).config()
        stages = set(check.config.stages) & set(config.stages)
        if stages or check.config.clash(config) or config.clash(check.config):
            _require_refusal(check, config)
            continue
        model = check.apply_patch(check.make_stock_model(), check.config, config)
        if check.mode == "blend":
            check.require_equal(
                run_model(model, check.family),
                run_model(check.make_stock_model(), check.family),
                1e-5,
                f"patching with {other}",
            )
        try:
            output = run_model(move_parameters(model, 0.2), check.family)
        except ValueError as error:
            check.fail(f"with {other} it is refused when it runs, not when it is patched", error)
        with tempfile.TemporaryDirectory() as folder:
            again = _save_and_load(model, folder)
        check.require_equal(run_model(again, check.family), output, 0, f"reloading with {other}")


def _require_refusal(check: Check, config: MechanismConfig) -> None:
    """Fail unless patching both mechanisms raises an error that names both."""
    other = config.mechanism
    try:
        check.apply_patch(check.make_stock_model(), check.config, config)
    except Refused as error:
        if not (check.config.mechanism in str(error) and other in str(error)):
            check.fail(f"the refusal with {other} does not name both", error)
    else:
        check.fail(f"it is patched with {other}, although a clash is declared")


@register_contract("llama", "bert")
def engines(check: Check) -> None:
    """Every engine agrees with `reference`, or refuses the mechanism by name."""
    model = set_backend(check.make_patched_model(), "reference")
    output = run_model(model, check.family)
    slopes = compute_gradients(model, check.family) if list_added(model) else {}
    for backend in ("blockwise", "cpu"):
        set_backend(model, backend)
        try:
            found = run_model(model, check.family)
        except ValueError as error:
            # A refusal names the engine. Any other error is a fault.
            if f"backend={backend!r}" not in str(error):
                raise
            continue
        check.require_equal(found, output, 5e-4, f"backend={backend!r}")
        for name, slope in (compute_gradients(model, check.family) if slopes else {}).items():
            most = 5e-3 * max(slopes[name].abs().max().item(), 1e-2)
            check.require_equal(
                slope, slopes[name], most, f"backend={backend!r}, the gradient of {name},"
            )


@register_contract("llama", "bert", about_learning=True)
def compiled(check: Check) -> None:
    """`torch.compile(fullgraph=True)` gives the same outputs and gradients."""
    torch.compiler.reset()
    model = check.make_patched_model(num_hidden_layers=1)
    once = torch.compile(model, fullgraph=True, backend="aot_eager")
    call = {"use_cache": False} if check.family in CAUSAL else {}
    check.require_equal(
        run_model(once, check.family, **call),
        run_model(model, check.family, **call),
        1e-4,
        "torch.compile",
    )
    way = lambda model: compute_gradients(model, check.family, **call)
    check.require_equal_but_rounding(way(once), model, way, 1e-5, "torch.compile")


@register_contract("llama", "bert")
def half(check: Check) -> None:
    """Half precision changes the output by a few times what rounded parameters do.

    Gradients are finite.
    """
    for dtype, most in ((torch.bfloat16, 8), (torch.float16, 15)):
        model = check.make_patched_model(0.1)
        exact = run_model(model, check.family)
        # First only the parameters are rounded, then everything is.
        distances = []
        for other in (copy.deepcopy(model).to(dtype).float(), model.to(dtype)):
            error = run_model(other, check.family).double() - exact
            distances.append(error.square().mean().sqrt().item())
        by_rounding, apart = distances
        if not apart <= most * by_rounding:
            check.fail(
                f"{dtype} moves the output by {apart:.1e}, rounded parameters by {by_rounding:.1e}"
            )
        compute_gradients(model, check.family)
        if not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
            check.fail(f"gradients are not finite in {dtype}")


@register_contract("llama", "bert", about_learning=True)
def checkpointing(check: Check) -> None:
    """Gradient checkpointing changes no gradient."""
    call = {"use_cache": False} if check.family in CAUSAL else {}
    expected = check.make_patched_model().train()
    compute_gradients(expected, check.family, **call)
    # Reentrant checkpointing adds gradients in another order, so they differ by rounding.
    for reentrant, most in ((False, 0.0), (True, 1e-5)):
        model = check.make_patched_model().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compute_gradients(model, check.family, **call)
        for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            first, second = (
                torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other)
            )
            check.require_equal(
                first, second, most, f"checkpointing (use_reentrant={reentrant}) of {name}"
            )


@register_contract("llama", "bert", about_learning=True)
def adapter(check: Check) -> None:
    """LoRA learns and is saved with the mechanism, and can be switched off."""
    from peft import PeftModel, get_peft_model

    base = check.make_patched_model(0.0)
    before = run_model(base, check.family)
    model = get_peft_model(base, lora_config(base, r=2))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        compute_output(model, check.family).square().mean().backward()
        optimizer.step()
    output = run_model(model.eval(), check.family)
    with model.disable_adapter():
        check.require_equal(run_model(model, check.family), before, 1e-6, "disable_adapter")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(check.make_patched_model(0.0), folder).eval()
    check.require_equal(
        run_model(again, check.family), output, 1e-6, "an adapter that is saved and loaded"
    )


@register_contract()
def by_name(check: Check) -> None:
    """`attn_implementation=` with the mechanism's name equals patching its config."""
    for name, config in get_mechanism(check.config.mechanism).names.items():
        model = check.make_stock_model()
        model.set_attn_implementation(name)
        cross = get_mechanism(config.mechanism).cross_attention
        replaced = check.apply_patch(
            check.make_stock_model(), config, include_cross_attention=cross
        )
        check.require_equal(
            run_model(model, check.family),
            run_model(replaced, check.family),
            1e-5,
            f"attn_implementation={name!r}",
        )


@register_contract("llama", "bert")
def described(check: Check) -> None:
    """`describe` lists the mechanism; its config survives `to_dict` and `from_dict`."""
    layers = [h for h in describe(check.make_patched_model())["hosts"] if h["mechanisms"]]
    if not layers or any(h["mechanisms"] != [check.config.mechanism] for h in layers):
        check.fail("describe does not show it")
    if MechanismConfig.from_dict(check.config.to_dict()) != check.config:
        check.fail("its config is another one after to_dict and from_dict")
