"""Report what a model's attention does on one text, with and without a patch.

`attention_report` returns the numbers that `hyperattn look` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import repeat_heads
from ..engines.options import read_visible
from ..engines.reference import hide_pairs
from ..engines.score import euclidean_distances
from ..integration import describe
from ..integration.patching.patch import base_model
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.cone import reference as cone
from ..mechanisms.hsa.reference import find_cover, list_kin
from ..mechanisms.hsa.request import fit_hierarchy, linear_features
from ..mechanisms.hsa.tree.key import trees_of
from ..mechanisms.hyperbolic import reference as hyperbolic
from ..mechanisms.score_layer import ScoreLayer
from ..mechanisms.selection.places import read_mask
from ..mechanisms.sparse.masking import mask_by_rules, read_text
from ..mechanisms.sparse.rules import SparseRule
from .cost import patched_layers
from .hyperbolicity import hyperbolicity, shuffled
from .perplexity import evaluation_mode, one_text

#: Default number of queries that are reported in detail.
QUERIES = 8
#: Default number of layers that are reported in detail.
LAYERS = 3
#: Largest number of bins per side of an attention map.
BINS = 64
#: Random quadruples of hidden states per measurement of hyperbolicity.
QUADRUPLES = 4000


@dataclass
class Layer:
    """One attention layer in one forward pass.

    Args:
        facts: Entry of the layer in `describe(model)`.
        weights: Attention weights [H, N, N] of the model as it runs. None: the layer returned none.
        hyper: Patch of the layer. None: not patched.
        call: Call of the patched layer. None: not patched.
        values: Learned numbers of the heads, [H], by "mechanism.name".
    """

    facts: dict[str, Any]
    weights: Tensor | None
    hyper: Any = None
    call: HostCall | None = None
    values: dict[str, Tensor] = field(default_factory=dict)

    def original_weights(self) -> Tensor | None:
        """Return the weights [H, N, N] of the original attention on the same queries and keys.

        Returns None without a patch.
        """
        if self.call is None:
            return None
        weights = Plan.from_call(self.call).run(backend="reference", weights=True)[1]
        return None if weights is None else weights[0]

    def find_mechanism(self, name: str) -> Any:
        """Return the patched layer of a mechanism, or None if it is not patched here."""
        return None if self.hyper is None else self.hyper._modules.get(name)


def attention_report(
    model: nn.Module,
    ids: Sequence[int] | Tensor,
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Report a model's attention on one text, as JSON-serialisable data.

    The model runs once. The original attention of a patched layer is computed on the queries and
    keys of the patched model, so the two differ only by the mechanism. Time and memory grow as N².

    Args:
        model: A Transformers decoder or encoder of one stack, patched or not. Its attention must
            return weights: load it with attn_implementation="eager" or a mechanism's name.
        ids: Token ids [N], at least 8.
        layers: Numbers of the layers to report in detail. None: three, among the patched layers if
            there are any.
        queries: Positions of the queries to report in detail. None: eight, evenly spaced.

    Returns:
        A dict with these keys:

        - ``tokens``: N.
        - ``queries``, ``layers``: the positions and layers in detail.
        - ``hosts``: name, heads, kind and mechanisms of every attention layer.
        - ``values``: for each learned number, such as "cone.gate", one list by head per layer, or
          None.
        - ``entropy``: mean entropy of a query in nats, under "model" and, for patched layers,
          under "own": lists by head.
        - ``sink``: mean share of the first token over all other queries, in the same form.
        - ``hyperbolicity``: mean and error for the hidden states before every layer and after the
          last one, and for their `shuffled` control.
        - ``details``: one dict per layer in detail, with "attention", and "cones", "disk", "hsa"
          and "rules" (sparse) for these mechanisms.

    Raises:
        ValueError: There are too few tokens, several texts, or ids that are not integers; a layer
            or query does not exist; the model returns no attention weights.
    """
    ids = one_text(ids)
    base = base_model(model)
    if len(ids) < QUERIES:
        raise ValueError(f"ids holds {len(ids)} tokens; allowed: {QUERIES} or more")
    # One pass gives the weights and calls of all layers, and the hidden states between them.
    seen, states = run_model(base, ids)
    # Choose what is reported in detail; everything else is reported for all layers.
    if layers is None:
        layers = spread_layers(seen)
    else:
        layers = check_numbers("layers", layers, len(seen))
    if queries is None:
        queries = (torch.linspace(len(ids) / QUERIES, len(ids), QUERIES).long() - 1).tolist()
    else:
        queries = check_numbers("queries", queries, len(ids))
    for layer in seen:
        layer.values = learned_values(layer)
    # Every layer gets an entry for each of these numbers; None if it does not have this one.
    names = dict.fromkeys(name for layer in seen for name in layer.values)
    original = [layer.original_weights() for layer in seen]
    facts = ("name", "heads", "kv_heads", "kind", "mechanisms")
    return {
        "tokens": len(ids),
        "queries": queries,
        "layers": layers,
        "hosts": [{key: layer.facts[key] for key in facts} for layer in seen],
        "values": {name: [to_plain(layer.values.get(name), 6) for layer in seen] for name in names},
        "entropy": summarize_weights(seen, original, mean_entropy),
        "sink": summarize_weights(seen, original, mean_sink),
        "hyperbolicity": [measure_tree_likeness(state) for state in states],
        "details": [describe_layer(seen[i], original[i], i, queries) for i in layers],
    }


def spread_layers(layers: Sequence[Layer]) -> list[int]:
    """Return the numbers of `LAYERS` evenly spread layers, among patched ones if there are any."""
    numbers = [i for i, layer in enumerate(layers) if layer.call is not None]
    numbers = numbers or list(range(len(layers)))
    # A set, because short models give the same layer more than once.
    return sorted({numbers[i * (len(numbers) - 1) // (LAYERS - 1)] for i in range(LAYERS)})


def run_model(base: Any, ids: Tensor) -> tuple[list[Layer], list[Tensor]]:
    """Run a model on one text.

    Returns:
        All attention layers, and the hidden states [N, width] before the first layer and after
        each layer.

    Raises:
        ValueError: The model does not return the weights of every attention layer.
    """
    calls: dict[str, HostCall] = {}
    hypers = dict(patched_layers(base))

    def keep_call(_, arguments, name: str) -> None:
        calls[name] = arguments[0]

    handles = [
        hyper.register_forward_pre_hook(partial(keep_call, name=name))
        for name, hyper in hypers.items()
    ]
    try:
        with evaluation_mode(base), torch.no_grad():
            tokens = ids[None].to(next(base.parameters()).device)
            out = base.base_model(tokens, output_attentions=True, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    hosts = describe(base)["hosts"]
    weights = getattr(out, "attentions", None) or ()
    complete = len(weights) == len(hosts)
    if not complete or not any(is_square(w, host, len(ids)) for w, host in zip(weights, hosts)):
        raise ValueError(
            f"{type(base).__name__} has {len(hosts)} attention layers and returned the weights of "
            f"{len(weights)}; allowed: a decoder or an encoder of one stack, loaded with "
            "attn_implementation='eager'"
        )
    layers = []
    for host, layer_weights in zip(hosts, weights):
        # Some layers may attend to less than the text, for example by segments.
        square = is_square(layer_weights, host, len(ids))
        layers.append(
            Layer(
                facts=host,
                weights=layer_weights[0].float() if square else None,
                hyper=hypers.get(host["name"]),
                call=calls.get(host["name"]),
            )
        )
    return layers, [state[0].float() for state in out.hidden_states]


def is_square(weights: Any, host: dict[str, Any], tokens: int) -> bool:
    """Return whether these are attention weights between all tokens."""
    return isinstance(weights, Tensor) and weights.shape == (1, host["heads"], tokens, tokens)


def check_numbers(name: str, numbers: Sequence[int], count: int) -> list[int]:
    """Return sorted numbers from 0 to `count` - 1. Negative ones count from the end.

    Raises:
        ValueError: A number is out of range, or there is none.
    """
    outside = [n for n in numbers if not -count <= n < count]
    if outside or not len(numbers):
        problem = outside[0] if outside else "no number"
        raise ValueError(f"{name} has {problem}; allowed: 0 to {count - 1}")
    return sorted({n % count for n in numbers})


def to_plain(values: Tensor | None, digits: int = 4) -> Any:
    """Return nested lists of rounded numbers. None stands for a missing tensor and for NaN."""
    if values is None or (values.dim() == 0 and values.isnan()):
        return None
    if values.dim() == 0:
        # The integer 0 is shorter than 0.0 in JSON, and causal weights are 0 half of the time.
        return round(values.item(), digits) or 0
    return [to_plain(part, digits) for part in values]


def learned_values(layer: Layer) -> dict[str, Tensor]:
    """Return the learned numbers of the heads, [H] each: gates, gamma, curvature and others."""
    values: dict[str, Tensor] = {}
    heads = layer.facts["heads"]
    mechanisms = layer.hyper._modules if layer.hyper is not None else {}
    for mechanism, part in mechanisms.items():
        # Gates and biases are parameters as they are. Scores store others in transformed form.
        for name, parameter in part.named_parameters():
            if name.endswith(("gate", "block_bias")) and parameter.shape == (heads,):
                values[f"{mechanism}.{name}"] = parameter.detach().float()
        if isinstance(part, ScoreLayer):
            for name, number in zip(part.learned, learned_numbers(part, layer), strict=True):
                values[f"{mechanism}.{name}"] = number.expand(heads)
    return values


def learned_numbers(part: Any, layer: Layer) -> list[Tensor]:
    """Return the learned numbers of a score layer, [H] or [1] each."""
    if part.config.mechanism == "hype":
        # HyPE learns factors of starting values, which depend on the call.
        if layer.call is None:
            return [torch.full((1,), torch.nan)] * len(part.learned)
        form = part.config.form or ("sinh" if layer.call.is_causal else "cosh")
        numbers = part.compute_parameters(form, layer.call, torch.float32)
    else:
        numbers = part.read_numbers(torch.float32)
    return [torch.as_tensor(n, dtype=torch.float32).detach().reshape(-1) for n in numbers]


def mean_entropy(weights: Tensor) -> Tensor:
    """Return the mean entropy of the queries' weights [H, N, N] in nats, [H].

    It is NaN for a head with negative weights. A gate of HSA below 0 or above 1 makes some.
    """
    weights = weights.double()
    # xlogy is 0 for weights of 0, so hidden keys add nothing.
    return -torch.xlogy(weights, weights).sum(-1).mean(-1)


def mean_sink(weights: Tensor) -> Tensor:
    """Return the mean weight [H] of the first token in weights [H, N, N]."""
    # Without the first query: in causal attention it can see only the first token.
    return weights[:, 1:, 0].double().mean(-1)


def summarize_weights(
    layers: Sequence[Layer],
    original: Sequence[Tensor | None],
    measure: Callable[[Tensor], Tensor],
) -> dict[str, list]:
    """Apply a measure to every layer's weights, as the model runs and with original attention."""
    model = [None if layer.weights is None else measure(layer.weights) for layer in layers]
    own = [None if weights is None else measure(weights) for weights in original]
    return {"model": [to_plain(x) for x in model], "own": [to_plain(x) for x in own]}


def measure_tree_likeness(state: Tensor) -> dict[str, float]:
    """Measure how far hidden states [N, width] are from a tree (0: a tree), and their control."""
    numbers: dict[str, float] = {}
    for name, points in (("", state), ("control_", shuffled(state))):
        # Only the mean over quadruples is used, so the exact delta gets the smallest sample.
        measured = hyperbolicity(points, size=4, draws=1, quadruples=QUADRUPLES)
        numbers[f"{name}mean"] = round(measured.mean, 4)
        numbers[f"{name}error"] = round(measured.mean_error, 5)
    return numbers


def describe_layer(
    layer: Layer, original: Tensor | None, number: int, queries: list[int]
) -> dict[str, Any]:
    """Return the details of one layer, head by head."""
    found: dict[str, Any] = {"layer": number, "attention": {}}
    for name, weights in (("model", layer.weights), ("own", original)):
        if weights is not None:
            found["attention"][name] = {
                "map": to_plain(bin_weights(weights)),
                "rows": to_plain(weights[:, queries]),
            }
    if layer.call is None:
        return found
    cone_part = layer.find_mechanism("cone")
    if cone_part is not None:
        found["cones"] = describe_cones(cone_part, layer.call)
    hyperbolic_part = layer.find_mechanism("hyperbolic")
    if hyperbolic_part is not None:
        found["disk"] = describe_disk(hyperbolic_part, layer.call, queries)
    if layer.find_mechanism("hsa") is not None:
        found["hsa"] = describe_cover(layer.hyper, layer.call, queries)
    if layer.find_mechanism("sparse") is not None:
        found["rules"] = describe_rules(layer.hyper, layer.call, queries)
    return found


def bin_weights(weights: Tensor) -> Tensor:
    """Reduce weights [H, N, N] to at most `BINS` bins of tokens per side.

    Weights are summed over the keys of a bin and averaged over its queries, so rows still sum to 1.
    """
    count = weights.shape[-1]
    bin_of = torch.arange(count, device=weights.device) * min(BINS, count) // count
    # [N, bins]: 1 where a token belongs to a bin.
    member = torch.nn.functional.one_hot(bin_of).to(weights.dtype)
    return (member / member.sum(0)).T @ weights @ member


def describe_cones(part: Any, call: HostCall) -> dict[str, Any]:
    """Return the keys of every head as cones.

    For each key: its height, its place along the axis in which the keys vary most, and the number
    of other tokens inside its cone. The number is computed in all dimensions.
    """
    gamma, radius = (
        torch.as_tensor(n, dtype=torch.float32).detach() for n in part.read_numbers(torch.float32)
    )
    heads = call.query.shape[1]
    variant = part.config.variant
    # Points of the half-space: each key becomes the apex of a cone, [H, N] heights and places.
    key = repeat_heads(call.key.float(), heads)[0]
    r = radius.expand(heads)[:, None]
    height, stretch = cone.height_and_stretch(key, part.config.resolved_mapping, r)
    height = cone.clamp_height(height, r) if part.config.clamp_heights else height
    place = cone.horizontal(key, stretch)
    # [H, N, N]: cone of the first key, at the height of the second one.
    width = half_width_of(variant, height[:, :, None], height[:, None, :], r[..., None])
    self_pair = torch.eye(key.shape[1], dtype=torch.bool, device=key.device)
    # Above its apex a cone has negative width, so no higher token lies inside.
    inside = (euclidean_distances(place, place) <= width) & ~self_pair
    across, explained = project_principal(place - place.mean(1, keepdim=True), 1)
    return {
        "variant": variant,
        "radius": to_plain(radius.expand(heads)),
        "gamma": to_plain(gamma.expand(heads)),
        "height": to_plain(height),
        "across": to_plain(across[..., 0]),
        "explained": to_plain(explained),
        "holds": inside.sum(-1).tolist(),
    }


def half_width_of(variant: str, apex: Tensor, height: Tensor, radius: Tensor) -> Tensor:
    """Return half the width of a cone at a height. It is negative above the apex.

    Args:
        variant: "umbral" or "penumbral".
        apex: Height of the apex.
        height: Height at which the cone is cut.
        radius: Parameter r of the score.
    """
    if variant == "umbral":
        return (apex - height) * torch.sinh(radius)
    lower, upper = (cone.half_width(h**2, radius**2) for h in (height, apex))
    return lower - upper


def project_principal(points: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """Project points [H, N, d] on the axes with the largest sums of squares.

    Returns:
        The coordinates [H, N, axes], and the share [H] of the squares that these axes explain.
    """
    u, s, _ = torch.linalg.svd(points.double(), full_matrices=False)
    share = s[:, :axes].square().sum(-1) / s.square().sum(-1).clamp_min(1e-300)
    return u[..., :axes] * s[:, None, :axes], share


def describe_disk(part: Any, call: HostCall, queries: list[int]) -> dict[str, Any]:
    """Return keys and some queries of every head in the Poincaré disk.

    For each point: its true radius times √c, and its angle in the plane that explains most of the
    points. The geodesic distances of the queries are computed in all dimensions.
    """
    heads = call.query.shape[1]
    scale = float(call.query.shape[-1]) ** -0.5
    curvature = part.read_numbers(torch.float32)[0]
    c = torch.as_tensor(curvature, dtype=torch.float32).detach().expand(heads)
    key = repeat_heads(call.key.float(), heads)
    query = call.query.float()[:, :, queries]
    # Keys and queries share one plane, so that their angles can be compared.
    points = torch.cat(
        [hyperbolic.lift_points(x, c[:, None], scale)[0][0] for x in (key, query)], 1
    )
    flat, explained = project_principal(points, 2)
    radius = points.norm(dim=-1)
    angle = torch.atan2(flat[..., 1], flat[..., 0])
    # With temperature 1, the logits are the negative distances.
    logits = hyperbolic.definition(
        query, key, c, torch.ones_like(c), scale=scale, distance="geodesic"
    )
    count = key.shape[2]
    return {
        "curvature": to_plain(c),
        "scored": part.config.distance,
        "explained": to_plain(explained),
        "radius": to_plain(radius[:, :count], 5),
        "angle": to_plain(angle[:, :count]),
        "query_radius": to_plain(radius[:, count:], 5),
        "query_angle": to_plain(angle[:, count:]),
        "distance": to_plain(-logits[0]),
    }


def describe_cover(hyper: Any, call: HostCall, queries: list[int]) -> dict[str, Any]:
    """Return what the queries of HSA read, computed by the definition.

    For every head and query: the closed blocks as (first token, end), and the number of tokens
    that are read one by one. A head that is not tied has None.
    """
    # Other mechanisms of the layer may change the score that HSA chooses blocks by.
    plan = Plan.from_call(call)
    for name, layer in hyper._modules.items():
        if name != "hsa":
            plan = layer(plan)
    part = hyper._modules["hsa"]
    heads, length = call.query.shape[1], call.key.shape[2]
    query, key = linear_features(plan.score)
    logits = (query @ repeat_heads(key, heads).mT)[0]
    if plan.options.bias is not None:
        logits = logits + plan.options.bias[0]
    seen = read_visible(hide_pairs(torch.zeros_like(logits)[None], plan.options)[0])
    # Layers of a prefix LM (`grows`) are tied like causal ones: their text grows, too.
    rule = part.config.rule(call.is_causal or part.grows, heads, "this call")
    counts = {
        name: expand_heads(getattr(rule, name), heads) for name in ("near", "sinks", "refine_top_k")
    }
    hierarchy = fit_hierarchy(part.config.windows, 1, length, call.is_causal)
    ((tree, tokens),) = trees_of(hierarchy, call.is_causal)
    # The trees of causal calls are filled up to whole windows. No query sees the added tokens.
    spare = len(tokens) - length
    logits, seen = (torch.nn.functional.pad(t, (0, spare)) for t in (logits, seen))
    facts = list_kin(tree)
    leaves = facts[1]
    covers: list[Any] = []
    for head in range(heads):
        numbers = {name: values[head] for name, values in counts.items()}
        is_tied = part.heads is None or head in part.heads
        rows = []
        for i in queries if is_tied else ():
            read, blocks = find_cover(logits[head, i], i, tree, facts, seen[head, i], **numbers)
            closed = sorted([leaves[block][0], leaves[block][-1] + 1] for block in blocks)
            rows.append({"tokens": len(read), "closed": closed})
        covers.append(rows or None)
    return {"windows": list(part.config.windows), "tying": rule.tying, **counts, "covers": covers}


def describe_rules(hyper: Any, call: HostCall, queries: list[int]) -> dict[str, Any]:
    """Return the sparse rule of every head, and what it shows to queries.

    For every head: the rule as text, the share of the visible pairs that it keeps on this text, and
    for every query the keys that it shows, as (first token, end).
    """
    part = hyper._modules["sparse"]
    heads, length = call.query.shape[1], call.key.shape[2]
    options = Plan.from_call(call).options
    rules = part.find_rules(0, heads, heads, call.is_causal)
    text = read_text(
        call.query,
        call.key,
        read_mask(call.query, call.key, options, call.is_causal, call.first),
        rules,
    )
    window = options.window or call.keywords.get("sliding_window")
    masked = mask_by_rules(call.query, call.key, call.scale, options, rules, text, window)
    logits = torch.zeros(1, heads, call.query.shape[2], length, device=call.query.device)
    every, shown = (read_visible(hide_pairs(logits, o)[0]) for o in (options, masked))
    pairs = every.sum((-1, -2)).clamp_min(1)
    # Rules for several lengths: those of the last token.
    of_heads = next((r for n, r in rules.by_length if n and n >= length), rules.by_length[-1][1])
    return {
        "rules": [format_rule(rule) for rule in of_heads],
        "share": to_plain(shown.sum((-1, -2)) / pairs),
        "shown": [[list_spans(shown[head, i]) for i in queries] for head in range(heads)],
    }


def format_rule(rule: SparseRule) -> str:
    """Return a rule as text, such as "window (near 256, sinks 4)"."""
    name, *settings = rule.to_dict().items()
    words = ", ".join(f"{key} {value}" for key, value in settings)
    return f"{name[1]} ({words})" if words else name[1]


def list_spans(shown: Tensor) -> list[list[int]]:
    """Return the runs of True in a bool tensor [N], as (first, end)."""
    edges = torch.nn.functional.pad(shown.int(), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return [[start, stop] for start, stop in zip(starts.tolist(), stops.tolist())]


def expand_heads(value: Any, heads: int) -> list[int]:
    """Return one number per head from a number for all heads or a tuple."""
    return list(value) if isinstance(value, tuple) else [value] * heads
