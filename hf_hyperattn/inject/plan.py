"""Plan an injection into a causal model: time and memory, from a short measurement.

A probe is measured instead of the model: the same architecture with few layers, a small vocabulary
and random weights. Every kind of pass of a run is timed on it at the real length. `plan_injection` adds
up what a run needs; the output embedding is measured by itself, since it does not grow with layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..analysis.cost import PeakMemory, read_clock
from ..integration import unpatch_model
from ..integration.attention.hosts import find_hosts, host_facts
from .causal import FIRST_SHARE, POWERS, TRIES_AT_PAIRS, CausalInjection
from .gradients import Head, compute_divergence, loss_of, predicted_of
from .injection import ROUNDS, Item, ids_of
from .measure import draw_sample
from .pays import pays_from
from .rules import CHUNK

#: Vocabulary size of the probe: so small that its output embedding takes no time.
WORDS = 64
#: Each pass is timed up to `RUNS` times, and the fastest time counts. A pass of more than `LONG`
#: seconds is timed once, because one-time setup matters little in it.
RUNS, LONG = 3, 10.0


@dataclass(frozen=True)
class InjectionPlan:
    """Expected time and memory of a run, see `plan_injection`.

    Args:
        stages: Seconds of each stage, as in `Injection.stages`, without loading and saving.
        passes: Number of passes over a text in each stage.
        candidate: Seconds of each further candidate, if verification refuses the first one.
        memory: Bytes of each part that is in memory at the same time.
        layers: Number of layers of the model.
        probed: Number of layers that were measured.
    """

    stages: dict[str, float]
    passes: dict[str, int]
    candidate: float
    memory: dict[str, int]
    layers: int
    probed: int

    @property
    def seconds(self) -> float:
        """Return the expected time of the whole run in seconds."""
        return sum(self.stages.values())

    @property
    def peak(self) -> int:
        """Return the expected peak of the memory in bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PassTimes:
    """Seconds of each kind of work on one text.

    Args:
        measure: Measuring all rules, with gradients.
        few: The same with `CHUNK` sampled queries instead of `CausalInjection.rows`.
        forward: A pass of the original model.
        joint: `measure_joint_loss`: the loss of an allocation, and the part of each head in it.
        patched: A pass of the patched model.
        pays: `pays_from`: finding the length from which the patched model beats the original.
        rules: Timing the rules, for the cost "time"; else 0. It does not grow with layers.
    """

    measure: float
    few: float
    forward: float
    joint: float
    patched: float
    pays: float
    rules: float


@dataclass(frozen=True)
class HeadTimes:
    """Seconds of the output embedding and a loss, per token.

    Args:
        loss: Cross-entropy, without its gradient.
        gradient: Cross-entropy and its gradient.
        divergence: KL of two models, and its gradient.
    """

    loss: float
    gradient: float
    divergence: float


class Silent:
    """Progress callbacks that show nothing."""

    def describe(self, text: str) -> None: ...

    def advance(self, steps: int) -> None: ...


def plan_injection(
    injection: CausalInjection,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    longest: int | None = None,
    compare: bool = False,
) -> InjectionPlan:
    """Measure a probe, and return the expected time and memory of `injection.run`.

    No weights are needed: `injection.model` may be on the meta device. It is not changed.

    Args:
        injection: The run to plan, with its texts and rules.
        device: Device of the run.
        dtype: dtype of the weights.
        longest: Largest length that the model can read, see `pays_from`.
        compare: Whether the run includes `compare_rivals`.

    Raises:
        OutOfReach: No rules are as cheap as `injection.pairs`.
    """
    device = torch.device(device)
    # Nothing is done here: only the start counts, the bytes that Python, libraries and texts already
    # take in the memory of a CPU.
    with PeakMemory(device) as before:
        pass
    layers, probe = build_probe(injection, device, dtype)
    probed = probe.model.config.get_text_config().num_hidden_layers
    with PeakMemory(device) as working:
        times = time_passes(probe, layers / probed, longest)
    # The weights of the probe are no part of what follows.
    del probe
    head = build_head(injection, device, dtype)
    with PeakMemory(device) as logits:
        head_times = time_head(head, injection.length)
    stages, passes = add_stages(injection, times, head_times, compare)
    memory = {} if device.type == "cuda" else {"Python and texts": before.start}
    memory |= count_kept(injection, layers, dtype)
    # The logits of a piece and the activations of a layer are not in memory at the same time.
    memory["one layer, or logits"] = max(working.added, logits.added)
    # One pass more than there are texts: `read_held_out` warms up with one.
    candidate = (len(injection.texts[2]) + 1) * times.patched
    candidate += count_tokens(injection.texts[2].values()) * head_times.loss
    return InjectionPlan(
        stages=stages,
        passes=passes,
        candidate=candidate,
        memory=memory,
        layers=layers,
        probed=probed,
    )


def build_probe(
    injection: CausalInjection, device: torch.device, dtype: torch.dtype
) -> tuple[int, CausalInjection]:
    """Build the injection of a small model with random weights.

    Returns:
        The number of layers of the whole model, and the injection.
    """
    config = copy.deepcopy(injection.model.config)
    text: Any = config.get_text_config()
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    count = 1
    if kinds:
        # The first layers that hold every kind: kinds repeat in most models.
        count = max(kinds.index(kind) for kind in set(kinds)) + 1
        text.layer_types = kinds[:count]
    text.num_hidden_layers = count
    text.vocab_size = WORDS
    # A padding token beyond the vocabulary would be an error.
    text.pad_token_id = None
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    item = {"text": ids_of(next(iter(injection.texts[0].values()))) % WORDS}
    # No tokenizer: retrieval examples are not needed, since a pass over one has as many tokens as a
    # pass over a text.
    probe = replace(injection, model=model, texts=[item] * 3, tokenizer=None, folder=None)
    probe.progress = Silent()
    return layers, probe


def time_passes(probe: CausalInjection, scale: float, longest: int | None) -> PassTimes:
    """Time every kind of pass on the probe.

    Args:
        probe: The injection of the probe.
        scale: Number of layers of the whole model over that of the probe.
        longest: Largest length that the model can read.
    """
    item = next(iter(probe.texts[0].values()))
    few_rows = replace(probe, rows=CHUNK)
    few_rows.progress = probe.progress

    def run_forward() -> None:
        with torch.no_grad():
            probe.compute_hidden(item)

    measure = time_fastest(probe.measure_texts)
    few = time_fastest(few_rows.measure_texts)
    whole = time_once(probe.measure_rules)
    forward = time_fastest(run_forward)
    with torch.no_grad():
        hidden = probe.compute_hidden(item)
    allocation = probe.choose_reachable(probe.pairs or FIRST_SHARE)
    joint = time_fastest(lambda: probe.measure_joint_loss(allocation, item, hidden))
    probe.apply_allocation(allocation)
    patched = time_fastest(run_forward)
    pays = time_once(lambda: pays_from(probe.model, ids_of(item), longest))
    if allocation.sparse:
        unpatch_model(probe.model)
    return PassTimes(
        measure=scale * measure,
        few=scale * few,
        forward=scale * forward,
        joint=scale * joint,
        patched=scale * patched,
        pays=scale * pays,
        rules=max(0.0, whole - measure) if probe.cost == "time" else 0.0,
    )


def build_head(injection: CausalInjection, device: torch.device, dtype: torch.dtype) -> Head:
    """Build an output embedding of the model's size, with random weights."""
    # Any: Transformers declares that a model may have none. Causal models have one.
    own: Any = injection.model.get_output_embeddings()
    words, width = own.weight.shape
    embedding = nn.Linear(width, words, bias=False, device=device, dtype=dtype)
    return Head(embedding=embedding.requires_grad_(False), ratio=1.0, dtype=dtype)


def time_head(head: Head, length: int) -> HeadTimes:
    """Time the losses of up to `length` tokens."""
    weight = head.embedding.weight
    words, width = weight.shape
    count = min(length, 2 * head.piece)
    hidden = torch.randn(count, width, device=weight.device).to(head.dtype)
    ids = torch.randint(words, (count,))
    return HeadTimes(
        loss=time_fastest(lambda: loss_of(head, hidden, ids, gradient=False)) / count,
        gradient=time_fastest(lambda: loss_of(head, hidden, ids)) / count,
        divergence=time_fastest(lambda: compute_divergence(head, hidden, hidden)) / count,
    )


def time_once(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    start = read_clock()
    work()
    return read_clock() - start


def time_fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of up to `RUNS` calls."""
    fastest = time_once(work)
    for _ in range(RUNS - 1):
        if fastest < LONG:
            fastest = min(fastest, time_once(work))
    return fastest


def add_stages(
    injection: CausalInjection, times: PassTimes, head: HeadTimes, compare: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the seconds and the number of passes of every stage of `Injection.run`.

    Verification is counted with one candidate.
    """
    first, second, third = map(len, injection.texts)
    tokens = [count_tokens(texts.values()) for texts in injection.texts]
    # The first `len(POWERS)` tries count as corrections. The search also reads the original model
    # once.
    corrections = len(POWERS)
    tries = (TRIES_AT_PAIRS if injection.pairs else injection.tries) - corrections
    both = times.forward + times.patched
    stages = {
        "measuring": first * times.few
        + count_shares(injection) * (times.measure - times.few)
        + tokens[0] * head.gradient
        + times.rules,
        "search": second * (times.forward + tries * times.patched)
        + tokens[1] * (1 + tries) * head.loss,
        "corrections": corrections
        * (second * times.joint + tokens[1] * (head.divergence + head.loss)),
        "held-out text": (third + 1) * both + 2 * tokens[2] * head.loss,
        "timing": (ROUNDS + 1) * both + times.pays,
    }
    passes = {
        "measuring": first,
        "search": second * (1 + tries),
        "corrections": corrections * second,
        "held-out text": 2 * (third + 1),
        "timing": 2 * (ROUNDS + 1),
    }
    if compare:
        rivals = 2 * len({rule.family for rule in (*injection.rules, *injection.rivals)})
        # The texts, one copied text and one mixture.
        items = sum(isinstance(item, torch.Tensor) for item in injection.texts[2].values()) + 2
        stages["comparison"] = items * (both + rivals * times.patched)
        passes["comparison"] = items * (2 + rivals)
    return stages, passes


def count_shares(injection: CausalInjection) -> float:
    """Return how many texts with all `injection.rows` sampled queries the first texts are worth.

    The time of measuring grows linearly with the sampled queries: a text counts 0 with one chunk of
    them, and 1 with all. Fewer queries are sampled of an example with few answers.
    """
    total = 0.0
    for item in injection.texts[0].values():
        spans = getattr(item, "spans", None)
        starts = draw_sample(len(ids_of(item)), injection.rows, injection.seed, spans).starts
        total += min(1.0, (len(starts) - 1) / max(1, injection.rows // CHUNK - 1))
    return total


def count_tokens(items: Iterable[Item]) -> int:
    """Return the number of tokens whose prediction counts."""
    return sum(len(predicted_of(getattr(i, "spans", None), len(ids_of(i)))) for i in items)


def count_kept(injection: CausalInjection, layers: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that a run keeps besides the activations of one layer."""
    model = injection.model
    values = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    states = injection.length * model.config.get_text_config().hidden_size * dtype.itemsize
    heads = sum(host_facts(name, host, 0).heads for name, host in find_hosts(model))
    rules = len(injection.rules) + len(injection.rivals)
    # `Sensitivity` has a float64 loss and a float32 KL for every head and rule.
    statistics = len(injection.texts[0]) * heads * rules * (8 + 4)
    return {
        "weights": values * dtype.itemsize,
        "hidden states between layers": layers * states,
        "final hidden states of all texts": len(injection.texts[1]) * states,
        "measured losses": statistics,
    }
