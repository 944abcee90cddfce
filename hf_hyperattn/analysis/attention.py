"""What the attention of a model does on one text, and what a patch changed there: the numbers of `hyperattn look`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import repeat_heads
from ..engines.options import read_visible
from ..engines.reference import hide
from ..engines.score import euclidean
from ..integration import describe
from ..integration.patching import base_model
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.cone import reference as cone
from ..mechanisms.hsa.masks import hierarchy_for
from ..mechanisms.hsa.reference import cover, kin
from ..mechanisms.hsa.request import linear_features
from ..mechanisms.hsa.tree.key import trees_of
from ..mechanisms.hyperbolic import reference as hyperbolic
from ..mechanisms.score_layer import ScoreLayer
from .cost import patched_layers
from .hyperbolicity import hyperbolicity, shuffled
from .perplexity import evaluation_mode, one_text

#: Queries and layers that are shown in detail, and bins of a map of attention.
QUERIES, LAYERS, BINS = 8, 3, 64
#: Quadruples of hidden states that their hyperbolicity is the mean over.
QUADRUPLES = 4000


@dataclass
class Layer:
    """One attention layer in one pass: its entry of `describe`, and what was seen of it."""

    facts: dict[str, Any]
    weights: Tensor | None  # [H, N, N], as the model runs; None where a layer has none
    hyper: Any = None
    call: HostCall | None = None
    values: dict[str, Tensor] = field(
        default_factory=dict
    )  # [H] by the mechanism's name and the value's

    def own(self) -> Tensor | None:
        """The weights of the host's own attention on the same queries and keys, [H, N, N]; None without a patch."""
        if self.call is None:
            return None
        weights = Plan.from_call(self.call).run(backend="reference", weights=True)[1]
        return None if weights is None else weights[0]

    def layer(self, mechanism: str) -> Any:
        """The layer of a mechanism that is patched in here, else None."""
        return None if self.hyper is None else self.hyper._modules.get(mechanism)


def attention_report(
    model: nn.Module,
    ids: Sequence[int] | Tensor,
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Everything that can be seen of a model's attention on one text, ready for JSON.

    The model runs once. The own attention of a patched layer is computed on the queries and keys that it has there, so
    that the two differ by the mechanism alone. Time and memory grow as N².

    Args:
        model: of Transformers, a decoder or an encoder of one stack, patched or not, whose attention returns weights:
            loaded with attn_implementation="eager", or with a mechanism's name.
        ids: token ids [N], at least 8.
        layers: of which details are wanted, by number; None: three, of those that are patched where some are.
        queries: positions, of which details are wanted; None: eight, evenly spaced.

    Returns:
        tokens (N), queries, layers (those in detail), hosts (of every layer name, heads, kind, mechanisms), values (by
        name, such as "cone.gate", of every layer a list by head, or None), entropy and sink ("model", and "own" at
        patched layers: lists by head; mean entropy of a query in nats, and the mean share of the first token for all
        queries but it), hyperbolicity (of the states before every layer and after the last: mean, error, and those of
        the control `shuffled`), and details, one a layer: attention, and cones, disk and hsa where they are there.

    Raises:
        ValueError: too few tokens, ids of several texts or that are no integers, a layer or query that is not there, or
            a model whose weights cannot be had.
    """
    ids = one_text(ids)
    base = base_model(model)
    if len(ids) < QUERIES:
        raise ValueError(f"ids holds {len(ids)} tokens; allowed: {QUERIES} or more")
    seen, states = run(base, ids)
    numbers = [i for i, layer in enumerate(seen) if layer.call is not None] or list(
        range(len(seen))
    )
    spread = sorted({numbers[i * (len(numbers) - 1) // (LAYERS - 1)] for i in range(LAYERS)})
    layers = checked("layers", layers, len(seen)) if layers is not None else spread
    spaced = torch.linspace(len(ids) / QUERIES, len(ids), QUERIES).long() - 1
    queries = checked("queries", queries, len(ids)) if queries is not None else spaced.tolist()
    for layer in seen:
        layer.values = learned_values(layer)
    names = dict.fromkeys(name for layer in seen for name in layer.values)
    own = [layer.own() for layer in seen]
    return {
        "tokens": len(ids),
        "queries": queries,
        "layers": layers,
        "hosts": [
            {key: layer.facts[key] for key in ("name", "heads", "kv_heads", "kind", "mechanisms")}
            for layer in seen
        ],
        "values": {name: [plain(layer.values.get(name), 6) for layer in seen] for name in names},
        "entropy": summary(seen, own, entropy),
        "sink": summary(seen, own, sink),
        "hyperbolicity": [tree_likeness(state) for state in states],
        "details": [details(seen[i], own[i], i, queries) for i in layers],
    }


def run(base: Any, ids: Tensor) -> tuple[list[Layer], list[Tensor]]:
    """Every layer, with its weights and its call, and the hidden states [N, width] before and after each."""
    calls: dict[str, HostCall] = {}
    hypers = dict(patched_layers(base))

    def hook(_, arguments, name: str) -> None:
        calls[name] = arguments[0]

    handles = [
        hyper.register_forward_pre_hook(partial(hook, name=name)) for name, hyper in hypers.items()
    ]
    try:
        with evaluation_mode(base), torch.no_grad():
            tokens = ids[None].to(next(base.parameters()).device)
            out = base.base_model(tokens, output_attentions=True, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    hosts, weights = describe(base)["hosts"], getattr(out, "attentions", None) or ()
    if len(weights) != len(hosts) or not any(
        is_square(w, host, len(ids)) for w, host in zip(weights, hosts)
    ):
        raise ValueError(
            f"{type(base).__name__} has {len(hosts)} attention layers and returned the weights of {len(weights)}; "
            "allowed: a decoder or an encoder of one stack, loaded with attn_implementation='eager'"
        )
    layers = [
        Layer(
            h,
            w[0].float() if is_square(w, h, len(ids)) else None,
            hypers.get(h["name"]),
            calls.get(h["name"]),
        )
        for h, w in zip(hosts, weights)
    ]
    return layers, [state[0].float() for state in out.hidden_states]


def is_square(weights: Any, host: dict[str, Any], tokens: int) -> bool:
    """Whether these are weights of pairs of all tokens."""
    return isinstance(weights, Tensor) and weights.shape == (1, host["heads"], tokens, tokens)


def checked(name: str, numbers: Sequence[int], count: int) -> list[int]:
    """Numbers of things that are there, each once; ValueError names one that is not."""
    strange = [n for n in numbers if not -count <= n < count]
    if strange or not len(numbers):
        raise ValueError(
            f"{name} has {strange[0] if strange else 'no number'}; allowed: 0 to {count - 1}"
        )
    return sorted({n % count for n in numbers})


def plain(values: Tensor | None, digits: int = 4) -> Any:
    """Nested lists of rounded numbers; None for what is no number."""
    if values is None or (values.dim() == 0 and values.isnan()):
        return None
    if values.dim() == 0:
        return round(values.item(), digits) or 0  # the many zeros of causal attention, short
    return [plain(part, digits) for part in values]


def learned_values(layer: Layer) -> dict[str, Tensor]:
    """What heads have learned, [H] each: gates, and numbers of the mechanisms as they stand (gamma, curvature, ...)."""
    values, heads = {}, layer.facts["heads"]
    for mechanism, part in (layer.hyper._modules if layer.hyper is not None else {}).items():
        for name, parameter in part.named_parameters():
            if name.endswith(("gate", "block_bias")) and parameter.shape == (heads,):
                values[f"{mechanism}.{name}"] = parameter.detach().float()
        if isinstance(part, ScoreLayer):
            for name, number in zip(part.learned, learned_numbers(part, layer), strict=True):
                values[f"{mechanism}.{name}"] = number.expand(heads)
    return values


def learned_numbers(part: Any, layer: Layer) -> list[Tensor]:
    """The numbers that a score's heads learn, [H] or [1] each; HyPE's start from what the config means for the host."""
    if part.config.mechanism == "hype":
        if layer.call is None:
            return [torch.full((1,), torch.nan)] * len(part.learned)
        form = part.config.form or ("sinh" if layer.call.is_causal else "cosh")
        numbers = part.start(form, layer.call, torch.float32)
    else:
        numbers = part.numbers(torch.float32)
    return [torch.as_tensor(n, dtype=torch.float32).detach().reshape(-1) for n in numbers]


def entropy(weights: Tensor) -> Tensor:
    """The mean over queries of the entropy of their weights [H, N, N], in nats: [H].

    No number for a head with weights below 0, which a gate of HSA below 0 or above 1 gives.
    """
    weights = weights.double()
    return -torch.xlogy(weights, weights).sum(-1).mean(-1)


def sink(weights: Tensor) -> Tensor:
    """The share of the first token in the weights [H, N, N] of a query, the mean over queries but the first: [H]."""
    return weights[:, 1:, 0].double().mean(-1)


def summary(layers: Sequence[Layer], own: Sequence[Tensor | None], measure) -> dict[str, list]:
    """A measure of every layer's weights by head, as the model runs and by the layer's own attention."""
    as_runs = [None if layer.weights is None else plain(measure(layer.weights)) for layer in layers]
    return {"model": as_runs, "own": [None if w is None else plain(measure(w)) for w in own]}


def tree_likeness(state: Tensor) -> dict[str, float]:
    """How near hidden states [N, width] are to a tree: 0 at best; and their control."""
    numbers: dict[str, float] = {}
    for name, points in (("", state), ("control_", shuffled(state))):
        measured = hyperbolicity(points, size=4, draws=1, quadruples=QUADRUPLES)
        numbers |= {
            f"{name}mean": round(measured.mean, 4),
            f"{name}error": round(measured.mean_error, 5),
        }
    return numbers


def details(layer: Layer, own: Tensor | None, number: int, queries: list[int]) -> dict[str, Any]:
    """What is shown of one layer, head by head."""
    found: dict[str, Any] = {"layer": number, "attention": {}}
    for name, weights in (("model", layer.weights), ("own", own)):
        if weights is not None:
            found["attention"][name] = {
                "map": plain(binned(weights)),
                "rows": plain(weights[:, queries]),
            }
    if layer.call is not None and layer.layer("cone") is not None:
        found["cones"] = cones(layer.layer("cone"), layer.call)
    if layer.call is not None and layer.layer("hyperbolic") is not None:
        found["disk"] = disk(layer.layer("hyperbolic"), layer.call, queries)
    if layer.call is not None and layer.layer("hsa") is not None:
        found["hsa"] = hsa_cover(layer.hyper, layer.call, queries)
    return found


def binned(weights: Tensor) -> Tensor:
    """Weights [H, N, N] in at most 64 bins of tokens: the sum over the keys of a bin, the mean over its queries."""
    count = weights.shape[-1]
    bin_of = torch.arange(count, device=weights.device) * min(BINS, count) // count
    member = torch.nn.functional.one_hot(bin_of).to(weights.dtype)
    return (member / member.sum(0)).T @ weights @ member


def cones(part: Any, call: HostCall) -> dict[str, Any]:
    """The keys of every head as cones: height, place along the axis in which they vary most, and how many other tokens
    lie in each, by distances in all dimensions.
    """
    gamma, radius = (
        torch.as_tensor(n, dtype=torch.float32).detach() for n in part.numbers(torch.float32)
    )
    heads, mapping = call.query.shape[1], part.config.resolved_mapping
    key, r = repeat_heads(call.key.float(), heads)[0], radius.expand(heads)[:, None]
    height, stretch = cone.height_and_stretch(key, mapping, r)
    height = cone.clamp_height(height, r) if part.config.clamp_heights else height
    place = cone.horizontal(key, stretch)
    width = half_width_of(part.config.variant, height[:, :, None], height[:, None, :], r[..., None])
    inside = (euclidean(place, place) <= width) & ~torch.eye(
        key.shape[1], dtype=torch.bool, device=key.device
    )
    across, explained = principal(place - place.mean(1, keepdim=True), 1)
    return {
        "variant": part.config.variant,
        "radius": plain(radius.expand(heads)),
        "gamma": plain(gamma.expand(heads)),
        "height": plain(height),
        "across": plain(across[..., 0]),
        "explained": plain(explained),
        "holds": inside.sum(-1).tolist(),
    }


def half_width_of(variant: str, apex: Tensor, height: Tensor, radius: Tensor) -> Tensor:
    """Half the width of a cone with its apex at one height, at another one; negative above the apex."""
    if variant == "umbral":
        return (apex - height) * torch.sinh(radius)
    return cone.half_width(height, radius) - cone.half_width(apex, radius)


def principal(points: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """Points [H, N, d] along the axes in which they have the largest squares, [H, N, axes], and the share of these."""
    u, s, _ = torch.linalg.svd(points.double(), full_matrices=False)
    share = s[:, :axes].square().sum(-1) / s.square().sum(-1).clamp_min(1e-300)
    return u[..., :axes] * s[:, None, :axes], share


def disk(part: Any, call: HostCall, queries: list[int]) -> dict[str, Any]:
    """Keys of every head in the Poincaré disk, and queries among them: their true radius, times √c, and the angle in
    the plane that holds most of them; geodesic distances of the queries in all dimensions.
    """
    heads, scale = call.query.shape[1], float(call.query.shape[-1]) ** -0.5
    c = torch.as_tensor(part.numbers(torch.float32)[0], dtype=torch.float32).detach().expand(heads)
    key, query = repeat_heads(call.key.float(), heads), call.query.float()[:, :, queries]
    points = torch.cat([hyperbolic.lift(x, c[:, None], scale)[0][0] for x in (key, query)], 1)
    flat, explained = principal(points, 2)
    radius, angle = points.norm(dim=-1), torch.atan2(flat[..., 1], flat[..., 0])
    distance = -hyperbolic.definition(
        query, key, c, torch.ones_like(c), scale=scale, distance="geodesic"
    )[0]
    count = key.shape[2]
    return {
        "curvature": plain(c),
        "scored": part.config.distance,
        "explained": plain(explained),
        "radius": plain(radius[:, :count], 5),
        "angle": plain(angle[:, :count]),
        "query_radius": plain(radius[:, count:], 5),
        "query_angle": plain(angle[:, count:]),
        "distance": plain(distance),
    }


def hsa_cover(hyper: Any, call: HostCall, queries: list[int]) -> dict[str, Any]:
    """What the queries read, by the definition: for every head and query the closed blocks, each (first token, end),
    and the number of tokens that are read one by one. A head that is not tied has None.
    """
    plan, part = Plan.from_call(call), hyper._modules["hsa"]
    for layer in (layer for name, layer in hyper._modules.items() if name != "hsa"):
        plan = layer(plan)
    heads, length = call.query.shape[1], call.key.shape[2]
    query, key = linear_features(plan.score)
    logits = (query @ repeat_heads(key, heads).mT)[0]
    if plan.options.bias is not None:
        logits = logits + plan.options.bias[0]
    seen = read_visible(hide(torch.zeros_like(logits)[None], plan.options)[0])
    rule = part.config.rule(call.is_causal or part.grows, heads, "this call")
    counts = {n: by_head(getattr(rule, n), heads) for n in ("near", "sinks", "refine_top_k")}
    ((tree, tokens),) = trees_of(
        hierarchy_for(part.config.windows, 1, length, call.is_causal), call.is_causal
    )
    spare = len(tokens) - length
    logits, seen = (torch.nn.functional.pad(t, (0, spare)) for t in (logits, seen))
    facts = kin(tree)
    covers: list[Any] = []
    for head in range(heads):
        rules = {n: values[head] for n, values in counts.items()}
        rows = []
        for i in queries if part.heads is None or head in part.heads else ():
            read, blocks = cover(logits[head, i], i, tree, facts, seen[head, i], **rules)
            closed = sorted([facts[1][b][0], facts[1][b][-1] + 1] for b in blocks)
            rows.append({"tokens": len(read), "closed": closed})
        covers.append(rows or None)
    return {"windows": list(part.config.windows), "tying": rule.tying, **counts, "covers": covers}


def by_head(value: Any, heads: int) -> list[int]:
    """One number for every head."""
    return list(value) if isinstance(value, tuple) else [value] * heads
