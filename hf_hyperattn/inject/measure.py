"""Measure how much the loss of a causal model rises if one head follows a sparse rule.

Let o be the output of a head, o_c its output under rule c, and G the gradient of the loss with
respect to o, all at one query. To second order, rule c changes the loss of a text by

    Σ G·(o_c - o) + ½ Σ (G·(o_c - o))²

The first sum is left out: its expectation under the model is 0, so on one text it is noise. The
second sum is the Fisher information along the change.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.perplexity import one_text
from ..config.fields import refuse
from ..integration import patch_model, unpatch_model
from ..mechanisms.base import HostCall, Plan
from .gradients import Spans, attention_gradients, in_float32, loss_of, predicted_of
from .kept import MeasurementFolder, fingerprint
from .rules import CHUNK, CandidateRule

#: Share of the sampled chunks that contain answers, if only answers count.
ANSWER_SHARE = 0.75
#: Number of attention logits that rules are compared on at a time. In float32 they take 256 MiB.
PAIRS = 2**26


@dataclass
class Sensitivity:
    """Losses of all rules at all heads, measured on the sampled queries of one text.

    All dicts map layer names, in model order, to tensors.

    Args:
        rules: The C candidate rules.
        costs: [H, C]: expected rise of the loss under each rule, in nats per counted token.
        kl: [H, C]: KL(under the rule ‖ ordinary attention), in nats.
        loss: Loss of the text per counted token.
        slopes: [R, H, C]: G·(o_c - o) at the R sampled queries. Empty unless requested.
    """

    rules: list[CandidateRule]
    costs: dict[str, Tensor] = field(default_factory=dict)
    kl: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    slopes: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Add the measurements of one layer, by field name."""
        for kind, tensor in tensors.items():
            getattr(self, kind)[name] = tensor

    def order(self, names: Sequence[str]) -> None:
        """Sort the layers of all fields into this order."""
        for kind in ("costs", "kl", "slopes"):
            tensors = getattr(self, kind)
            setattr(self, kind, {name: tensors[name] for name in names if name in tensors})


@dataclass(frozen=True)
class Sample:
    """Chunks of queries that represent all queries of a text.

    Args:
        starts: First query of each chunk.
        weights: Number of chunks of the text that each chunk stands for, float64.
        counted: Number of tokens whose prediction counts.
    """

    starts: list[int]
    weights: Tensor
    counted: int


def draw_starts(length: int, rows: int, seed: int) -> list[int]:
    """Draw chunk starts that are spread evenly over a text, each with a random shift.

    Args:
        length: Number of tokens of the text.
        rows: Number of queries to sample.
        seed: Seed of the shifts.
    """
    count = max(1, min(rows, length) // CHUNK)
    shift = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    places = ((torch.arange(count) + shift) * (length / CHUNK / count)).long() * CHUNK
    # The last chunk must end with the text. Rounding may also give the same start twice.
    return sorted({min(int(place), length - CHUNK) for place in places})


def draw_sample(length: int, rows: int, seed: int, spans: Spans | None) -> Sample:
    """Draw chunks of queries: evenly, or mostly where answers are.

    Args:
        length: Number of tokens of the text.
        rows: Number of queries to sample.
        seed: Random seed.
        spans: Ranges of the answer tokens. None: all tokens count.
    """
    if spans is None:
        starts = draw_starts(length, rows, seed)
        # Not `length / rows`: fewer chunks than requested may fit.
        weight = length / (len(starts) * CHUNK)
        weights = torch.full((len(starts),), weight, dtype=torch.float64)
        return Sample(starts, weights, length)
    chunks = torch.arange(length // CHUNK)
    has_answer = torch.zeros(length // CHUNK, dtype=torch.bool)
    # A ragged end of the text belongs to the last whole chunk.
    has_answer[(predicted_of(spans, length) // CHUNK).clamp_max(len(chunks) - 1)] = True
    weight_of: dict[int, float] = {}
    # Queries elsewhere change the loss too, because later layers read their outputs.
    for stratum, share in (
        (chunks[has_answer], ANSWER_SHARE),
        (chunks[~has_answer], 1 - ANSWER_SHARE),
    ):
        # A stratum is empty if all chunks have answers, or none has.
        if len(stratum):
            drawn = draw_starts(len(stratum) * CHUNK, int(share * rows), seed)
            for start in drawn:
                weight_of[int(stratum[start // CHUNK]) * CHUNK] = len(stratum) / len(drawn)
    starts = sorted(weight_of)
    return Sample(
        starts=starts,
        weights=torch.tensor([weight_of[start] for start in starts], dtype=torch.float64),
        # The first token has nothing to be predicted from.
        counted=sum(stop - max(start, 1) for start, stop in spans),
    )


def measure(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    rules: Sequence[CandidateRule],
    *,
    rows: int = 384,
    seed: int = 0,
    on_layer: Callable[[str], None] | None = None,
    keep_slopes: bool = False,
    spans: Spans | None = None,
    folder: Path | str | None = None,
    resume: bool = True,
) -> Sensitivity:
    """Measure rules at every head of a causal model on one text.

    Args:
        model: An unpatched model. It is patched during the measurement.
        ids: Token ids [N] or [1, N], at least 16.
        rules: Candidate rules. Rules of one class must be adjacent.
        rows: Number of sampled queries, at least 16. They are drawn in chunks of 16.
        seed: Seed of the sample.
        on_layer: Called with the name of every finished layer.
        keep_slopes: Also return `slopes`. They may be large, so `folder` is not used then.
        spans: (start, stop) of the tokens whose prediction counts, in order, as in an `Example`.
            None: all tokens.
        folder: Folder that stores the measurements, one file per layer. None: store nothing.
        resume: Reuse measurements in `folder` with the same model, text, rules, rows, seed and
            spans. False: delete them and measure again.

    Raises:
        ValueError: The ids are several texts, not integers, or too few; there are too few rows;
            the spans overlap, are not in order, or do not lie in 1..N.
    """
    ids = one_text(ids)
    check_arguments(ids, rows, spans)
    result = Sensitivity(list(rules))
    sample = draw_sample(len(ids), rows, seed, spans)
    stored = None
    if folder is not None and not keep_slopes:
        options = {
            "rows": rows,
            "seed": seed,
            "spans": None if spans is None else [list(span) for span in spans],
        }
        stored = MeasurementFolder(Path(folder) / fingerprint(model, ids, rules, **options))
        if not resume:
            shutil.rmtree(stored.folder, ignore_errors=True)
        elif summary := stored.read_summary():
            return read_measurement(result, stored, summary, on_layer)
    measured: list[str] = []

    def on_gradient(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        if is_plain(call, len(ids)):
            tensors = stored.read_layer(name) if stored else None
            if tensors is None:
                tensors = layer_costs(call, out, gradient, result.rules, sample, keep_slopes)
                if stored:
                    stored.write_layer(name, tensors)
            measured.append(name)
            result.add(name, tensors)
        if on_layer:
            on_layer(name)

    # With gates at 0, the patched model still computes its own attention.
    patch_model(model, rules[0].base_config(), mode="blend")
    try:
        loss = partial(loss_of, ids=ids, spans=spans)
        result.loss = attention_gradients(model, ids, on_gradient, loss)
    finally:
        unpatch_model(model)
    # The backward pass reaches the last layer first.
    names = measured[::-1]
    result.order(names)
    if stored:
        stored.write_summary(names, result.loss)
    return result


def check_arguments(ids: Tensor, rows: int, spans: Spans | None) -> None:
    """Raise ValueError if the text, the rows or the spans cannot be measured."""
    if len(ids) < CHUNK:
        raise ValueError(f"ids holds {len(ids)} tokens; allowed: {CHUNK} or more")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < CHUNK:
        refuse("rows", rows, f"integers from {CHUNK}")
    if spans is None:
        return
    # The first token has nothing to be predicted from, so spans begin at 1.
    places = [1, *(place for span in spans for place in span), len(ids)]
    ordered = all(a <= b for a, b in pairwise(places))
    if not spans or not ordered or any(start >= stop for start, stop in spans):
        refuse(
            "spans", spans, f"one (start, stop) or more in 1..{len(ids)}, in order, without overlap"
        )


def read_measurement(
    result: Sensitivity,
    stored: MeasurementFolder,
    summary: Mapping[str, Any],
    on_layer: Callable[[str], None] | None,
) -> Sensitivity:
    """Fill `result` with a complete measurement from disk and return it."""
    for name in summary["layers"]:
        result.add(name, stored.read_layer(name) or {})
        if on_layer:
            on_layer(name)
    result.loss = summary["loss"]
    return result


def layer_costs(
    call: HostCall,
    out: Tensor,
    gradient: Tensor,
    rules: Sequence[CandidateRule],
    sample: Sample,
    keep_slopes: bool,
) -> dict[str, Tensor]:
    """Measure one layer in float32 and return the tensors by field name of `Sensitivity`."""
    if out.dtype != torch.float32:
        # The rounding of a 16-bit output would count as a change by every rule.
        call = in_float32(call)
        out, _ = Plan.from_call(call).run()
    slopes, kl = compare_rules(call, out, gradient, rules, sample.starts)
    # The layers of one model may be on different devices, so results are collected on the CPU.
    slopes = slopes.cpu()
    kl = kl.cpu()
    # ½ (G·(o_c - o))², averaged within each chunk: [chunks, H, C].
    squares = slopes.double().square().unflatten(0, (-1, CHUNK)).mean(1)
    # Each chunk stands for `weight` chunks of `CHUNK` queries; divide by the counted tokens.
    shares = (0.5 * CHUNK / sample.counted) * sample.weights[:, None, None]
    tensors = {"costs": (shares * squares).sum(0), "kl": kl}
    if keep_slopes:
        tensors["slopes"] = slopes
    return tensors


def is_plain(call: HostCall, length: int) -> bool:
    """Return whether attention is causal over the whole text, without features that rules lack."""
    options = call.options
    windowed = options.window is not None and options.window < length
    plain = options.bias is None and options.softcap is None and not windowed
    plain = plain and call.is_causal and call.query.shape[2] == call.key.shape[2] == length
    return plain and (options.mask is None or hides_only_later(call))


def hides_only_later(call: HostCall) -> bool:
    """Return whether the mask hides only later tokens.

    gpt-oss passes such a mask in every call, although `is_causal` already says the same.
    """
    real = call.read_mask().real_if_only_padding
    return real is not None and bool(real.all())


def compare_rules(
    call: HostCall,
    out: Tensor,
    gradient: Tensor,
    rules: Sequence[CandidateRule],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the slopes [R, H, C] and the KL divergences [H, C] of one layer."""
    heads, keys = call.query.shape[1], call.key.shape[2]
    count = max(1, PAIRS // (CHUNK * heads * keys))
    parts = [
        compare_chunks(call, out, gradient, rules, starts[i : i + count])
        for i in range(0, len(starts), count)
    ]
    slopes, divergences = (torch.cat(tensors) for tensors in zip(*parts))
    return slopes, divergences.mean(0)


def compare_chunks(
    call: HostCall,
    out: Tensor,
    gradient: Tensor,
    rules: Sequence[CandidateRule],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the slopes and the KL divergences of some chunks of queries, [R, H, C] each."""
    places = torch.cat([torch.arange(start, start + CHUNK) for start in starts])
    plain = out[0][:, places].float()
    G = gradient[0][:, places].float()

    def project_change(outputs: Tensor) -> Tensor:
        return (G * (outputs - plain)).sum(-1)

    slopes, divergences = [], []
    # Rules of one class share work, such as the logits of the sampled queries.
    for _, same_class in groupby(rules, type):
        members = list(same_class)
        for slope, divergence in members[0].compare(call, members, starts, project_change):
            slopes.append(slope.T)
            divergences.append(divergence.T)
    return torch.stack(slopes, -1), torch.stack(divergences, -1)
