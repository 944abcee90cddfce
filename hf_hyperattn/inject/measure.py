"""What sparse rules at single heads cost a causal model, measured before any is chosen.

With o the output of a head, o_c its output under the rule c, and G the gradient of the loss with respect to o, both at
one query, the change that c makes to the loss of a text is about

    Σ G·(o_c - o) + ½ Σ (G·(o_c - o))²

The first term is noise of the text, its expectation under the model being 0, and is left out. The second is the Fisher
information along the change.
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
from ..fields import refuse
from ..integration import patch_model, unpatch_model
from ..mechanisms.base import HostCall
from .gradients import Spans, attention_gradients, loss_of, predicted_of
from .kept import Kept, fingerprint
from .rules import CHUNK, CandidateRule


@dataclass
class Sensitivity:
    """What was measured on the sampled queries of one text; tensors by layer, the layers in the model's order.

    Args:
        rules: the C candidates.
        costs: [H, C]: what a rule is expected to cost, in nats a token that counts.
        kl: [H, C]: KL(under the rule ‖ ordinary attention), in nats.
        loss: of the text, a token that counts.
        slopes: [R, H, C]: G·(o_c - o) at R sampled queries; only where they are to be kept.
    """

    rules: list[CandidateRule]
    costs: dict[str, Tensor] = field(default_factory=dict)
    kl: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    slopes: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Take in what was measured of a layer."""
        for kind, tensor in tensors.items():
            getattr(self, kind)[name] = tensor

    def order(self, names: Sequence[str]) -> None:
        """Put the layers in this order."""
        for kind in ("costs", "kl", "slopes"):
            tensors = getattr(self, kind)
            setattr(self, kind, {name: tensors[name] for name in names if name in tensors})


@dataclass(frozen=True)
class Sample:
    """Chunks of queries, and how many queries of the text each query of a chunk stands for.

    Args:
        starts: the first query of each. weights: of each, together those of all queries.
        counted: tokens of the text whose prediction counts.
    """

    starts: list[int]
    weights: Tensor
    counted: int


def sampled(length: int, rows: int, seed: int) -> list[int]:
    """Starts of chunks of queries, spread evenly over a text with a random shift of each."""
    count = max(1, min(rows, length) // CHUNK)
    shift = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    places = ((torch.arange(count) + shift) * (length / CHUNK / count)).long() * CHUNK
    return sorted({min(int(p), length - CHUNK) for p in places})


def sample(length: int, rows: int, seed: int, spans: Spans | None) -> Sample:
    """Chunks that measure a text: spread evenly; where only answers count, three quarters of them where those are."""
    if spans is None:
        starts = sampled(length, rows, seed)
        count = len(starts) * CHUNK
        return Sample(
            starts, torch.full((len(starts),), length / count, dtype=torch.float64), length
        )
    chunks = torch.arange(length // CHUNK)
    answers = torch.zeros(length // CHUNK, dtype=torch.bool)
    answers[(predicted_of(spans, length) // CHUNK).clamp_max(len(chunks) - 1)] = True
    starts, weights = [], []
    for stratum, share in ((chunks[answers], 0.75), (chunks[~answers], 0.25)):
        drawn = (
            [x // CHUNK for x in sampled(len(stratum) * CHUNK, int(share * rows), seed)]
            if len(stratum)
            else []
        )
        starts += [int(stratum[i]) * CHUNK for i in drawn]
        weights += [
            len(stratum) / len(drawn) for _ in drawn
        ]  # none where all chunks have answers, or none has
    order = sorted(range(len(starts)), key=starts.__getitem__)
    counted = sum(stop - max(start, 1) for start, stop in spans)
    return Sample(
        [starts[i] for i in order],
        torch.tensor([weights[i] for i in order], dtype=torch.float64),
        counted,
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
        model: not patched; it is, while it is measured.
        ids: token ids [N] or [1, N], at least 16.
        rules: the candidates, those of one class beside each other.
        rows: how many queries are sampled, in chunks of 16; at least 16.
        on_layer: called with the name of every layer that is done.
        keep_slopes: of which there may be many, so that nothing is kept in `folder`, or taken from there.
        spans: (start, stop) of the tokens whose prediction counts, as an `Example` has them, in order; None: all.
        folder: keeps what is measured, a file a layer; None: nothing is kept.
        resume: take from `folder` what an earlier run with the same model, text, rules, rows, seed and spans left
            there; False: it is measured anew.

    Raises:
        ValueError: ids of several texts, or no integers; too few tokens or rows; spans that overlap, are not in order,
            or do not lie in 1..N.
    """
    ids = one_text(ids)
    check(ids, rows, spans)
    result, drawn = Sensitivity(list(rules)), sample(len(ids), rows, seed, spans)
    kept = None
    if folder is not None and not keep_slopes:
        options = {
            "rows": rows,
            "seed": seed,
            "spans": None if spans is None else [list(span) for span in spans],
        }
        kept = Kept(Path(folder) / fingerprint(model, ids, rules, **options))
        if not resume:
            shutil.rmtree(kept.folder, ignore_errors=True)
        elif whole := kept.whole():
            return read_whole(result, kept, whole, on_layer)
    seen: list[str] = []

    def on_gradient(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        if is_plain(call, len(ids)):
            tensors = kept.read(name) if kept else None
            if tensors is None:
                tensors = layer_costs(call, out, gradient, result.rules, drawn, keep_slopes)
                if kept:
                    kept.write(name, tensors)
            seen.append(name)
            result.add(name, tensors)
        if on_layer:
            on_layer(name)

    patch_model(
        model, rules[0].base_config(), mode="blend"
    )  # gates at 0: the attention is the model's own
    try:
        result.loss = attention_gradients(
            model, ids, on_gradient, partial(loss_of, ids=ids, spans=spans)
        )
    finally:
        unpatch_model(model)
    result.order(seen[::-1])  # the last layer came first
    if kept:
        kept.finish(seen[::-1], result.loss)
    return result


def check(ids: Tensor, rows: int, spans: Spans | None) -> None:
    """Refuse what cannot be measured, or would be measured as something else."""
    if len(ids) < CHUNK:
        raise ValueError(f"ids holds {len(ids)} tokens; allowed: {CHUNK} or more")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < CHUNK:
        refuse("rows", rows, f"integers from {CHUNK}")
    if spans is None:
        return
    places = [1, *(place for span in spans for place in span), len(ids)]
    fits = all(a <= b for a, b in pairwise(places)) and all(start < stop for start, stop in spans)
    if not spans or not fits:  # the first token is predicted from nothing
        refuse(
            "spans", spans, f"one (start, stop) or more in 1..{len(ids)}, in order, without overlap"
        )


def read_whole(result: Sensitivity, kept: Kept, whole: Mapping[str, Any], on_layer) -> Sensitivity:
    """All that an earlier run kept."""
    for name in whole["layers"]:
        result.add(name, kept.read(name) or {})
        if on_layer:
            on_layer(name)
    result.loss = whole["loss"]
    return result


def layer_costs(
    call: HostCall,
    out: Tensor,
    gradient: Tensor,
    rules: Sequence[CandidateRule],
    drawn: Sample,
    keep_slopes: bool,
) -> dict[str, Tensor]:
    """What is measured of one layer, by the fields of `Sensitivity`."""
    slopes, kl = (
        t.cpu() for t in compare(call, out, gradient, rules, drawn.starts)
    )  # layers may be on any device
    squares = slopes.double().square().unflatten(0, (-1, CHUNK)).mean(1)  # [chunks, H, C]
    shares = (0.5 * CHUNK / drawn.counted) * drawn.weights[:, None, None]  # of a token that counts
    return {"costs": (shares * squares).sum(0), "kl": kl} | (
        {"slopes": slopes} if keep_slopes else {}
    )


def is_plain(call: HostCall, length: int) -> bool:
    """Whether the attention is causal over the whole text, with nothing that rules do not have."""
    options = call.options
    windowed = options.window is not None and options.window < length
    plain = options.bias is None and options.softcap is None and not windowed
    plain = plain and call.is_causal and call.query.shape[2] == call.key.shape[2] == length
    return plain and (options.mask is None or hides_nothing_before(call))


def hides_nothing_before(call: HostCall) -> bool:
    """Whether a mask hides later tokens alone, as that of gpt-oss does, which has no call without one."""
    real = call.read_mask().real_if_only_padding
    return real is not None and bool(real.all())


def compare(
    call: HostCall,
    out: Tensor,
    gradient: Tensor,
    rules: Sequence[CandidateRule],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Slopes [R, H, C] and KL divergences [H, C] of one layer."""
    at = torch.cat([torch.arange(s, s + CHUNK) for s in starts])
    plain, G = (t[0].float()[:, at] for t in (out, gradient))
    project = lambda outputs: (G * (outputs - plain)).sum(-1)
    slopes, kl = [], []
    for _, group in groupby(rules, type):
        alike = list(group)
        for slope, divergence in alike[0].compare(call, alike, starts, project):
            slopes.append(slope.T)
            kl.append(divergence.mean(1))
    return torch.stack(slopes, -1), torch.stack(kl, -1)
