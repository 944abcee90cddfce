"""`@ha.score`: a score from outside the package, written once as plain torch arithmetic on one pair.

The function is traced when it is defined; engines evaluate it, or what is emitted from its graph (engines/trace.py).
What it reads it names as its arguments; vectors count times the root of the host's scale, so that `dot` is the host's
own logit and everything else fits it:

    dot                             scale · q·k
    squared_distance                |q - k|², from differences where the two nearly coincide
    query_norm, key_norm            |q| and |k|, at least 1e-12
    query_position, key_position    which tokens of their row they are; no gradient
    query_<name>, key_<name>        a statistic of the author's own
    others, which have a default    parameters that every query head learns from that value; after a `*`, constants
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..config import MechanismConfig, option
from ..engines import Options, attention, register_term
from ..engines.score import TERMS, upcast_for_grad
from ..engines.trace import GRAD, LEAVES, compute_gradients, sort_ancestors, trace_term
from ..fields import LARGEST, refuse, short
from ..registry import MECHANISMS, Mechanism, register
from .base import Host, HostCall
from .checks import check_call, check_number, check_parameter
from .hype.positions import checked_positions, of_call
from .pair_score import SIDES, Definition, PairSpace, Start, make_term, vectors_of
from .score_layer import ScoreLayer

logger = logging.getLogger("hf_hyperattn")

#: What parameters may not be called: arguments of `scored_attention`, and keys of a record.
TAKEN = (
    "query key value attn_mask dropout_p is_causal scale enable_gqa score query_positions key_positions backend "
    "definition defined_in formula"
).split()
SCORE_NAME = "hf_hyperattn_score"  # an attribute of functions that are registered
PAIR = ("dot", "squared_distance")
#: What names of attention in Transformers may not hold.
RESERVED = ("flash", "sdpa", "flex_attention", "paged")
Function = TypeVar("Function", bound=Callable[..., Tensor])


class PairLayer(ScoreLayer):
    """A score from outside inside a host, see `ScoreLayer`.

    Parameters, zero at first, beside the gate: for each that the score learns `log_<name>` [H], the logarithm of the
    number over its start, or where that is 0, `added_<name>`, the number itself; for a vector `added_<name>` [H, d],
    what is added to its start.
    """

    reads_call = True
    config: ScoreConfig

    def __init__(self, config: ScoreConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.host = host
        d = config.definition
        self.counts_keys = d.reads_positions
        if host is not None:
            for name in d.parameters:
                check_count(config, name, host.heads)
        for name in d.learned:
            setattr(self, config.parameter_name(name), self.per_head(host))
        for name in d.vectors:
            if host is not None and host.head_dim is None:
                raise ValueError(
                    f"{config.mechanism} needs the head dimension of {host.name}, and nothing tells it; allowed: "
                    "attention layers with projections of queries and keys, choose them with layers=..."
                )
            shape = None if host is None else torch.zeros(host.heads, host.head_dim or 0)
            setattr(self, f"added_{name}", None if shape is None else nn.Parameter(shape))

    def space_of(self, call: HostCall, dtype: torch.dtype) -> PairSpace:
        """The score with its numbers as they stand, for one call."""
        config, rank, values = self.config, call.heads, {}
        d, total = config.definition, call.query.shape[1] if rank is None else rank.total
        if not call.scale > 0:
            where = "this layer" if self.host is None else self.host.name
            raise ValueError(
                f"{config.mechanism} is a score of scaled vectors, and {where} has scale {call.scale}"
            )
        for name in d.parameters:
            value: Any = getattr(config, name)
            if isinstance(value, tuple):
                check_count(config, name, total)
                value = torch.tensor(value, dtype=dtype, device=call.query.device)
                value = value if rank is None else rank.slice_rank(value)
            moved = getattr(self, config.parameter_name(name)) if name in d.learned else None
            if moved is not None:
                zero = config.starts_at_zero(name)
                value = value + moved.to(dtype) if zero else value * torch.exp(moved.to(dtype))
            values[name] = value
        for name in d.vectors:
            moved = getattr(self, f"added_{name}")
            values[name] = (
                getattr(config, name) if moved is None else getattr(config, name) + moved.to(dtype)
            )
        positions = of_call(call, self.host, d.name) if d.reads_positions else None
        return PairSpace(d, values, call.scale, positions)


@dataclass(frozen=True, init=False)
class ScoreConfig(MechanismConfig):
    """Configuration of a score that `@ha.score` registered: `ScoreConfig("my_score", slope=0.2)`.

    Args:
        score: the name that it is registered under.
        **parameters: starting values in place of those in its definition: numbers, or one number a query head.
    """

    score: str = option("", "the name that the score is registered under")

    if TYPE_CHECKING:
        definition: ClassVar[Definition]  # what its author wrote

        def __init__(self, score: str, **parameters: float | Sequence[float]) -> None: ...

    else:

        def __new__(cls, score="", **parameters):
            return super().__new__(
                config_of(score) if cls is ScoreConfig else cls, score=score, **parameters
            )

    def __post_init__(self):
        d = self.definition
        if self.score != d.name:
            self._refuse("score", repr(d.name))
        for name in d.parameters:
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
                for number in value:
                    check_number(f"ScoreConfig.{name}", number)
                if not value or (name in d.learned and 0 in value and any(value)):
                    self._refuse(
                        name, "a number, or one for every query head, not 0 for some of them alone"
                    )
        super().__post_init__()

    def __reduce__(self):
        return MechanismConfig.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """As every config, and where the score is defined, and the hash of its formula."""
        values = super().to_dict()
        del values["score"]
        return values | {
            "defined_in": self.definition.defined_in,
            "formula": self.definition.formula,
        }

    @classmethod
    def checked_record(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A record without what it says of its origin; another formula than the one registered is warned of."""
        formula = data.get("formula")
        if formula is not None and formula != cls.definition.formula:
            warn_of_formula(cls.definition, short(formula))
        return {k: v for k, v in data.items() if k not in ("defined_in", "formula")}

    def starts_at_zero(self, name: str) -> bool:
        """Whether a parameter is learned by addition; others keep their sign."""
        value = getattr(self, name)
        return not any(value) if isinstance(value, tuple) else not value

    def parameter_name(self, name: str) -> str:
        """What a learned parameter is called in a state dict."""
        return f"added_{name}" if self.starts_at_zero(name) else f"log_{name}"


def warn_of_formula(d: Definition, formula: str) -> None:
    """Say that a checkpoint was saved with another formula."""
    logger.warning(
        f"score {d.name!r} of {d.defined_in} computes another formula ({d.formula!r}) than the one that this was saved "
        f"with ({formula}): outputs differ, unless its form alone has changed; put it back, or save the model again"
    )


def config_of(name: object) -> type[ScoreConfig]:
    """The config class of a score.

    Raises:
        ValueError: no score has that name.
    """
    if (
        isinstance(name, str)
        and name in MECHANISMS
        and issubclass(MECHANISMS[name].config, ScoreConfig)
    ):
        return MECHANISMS[name].config
    known = sorted(n for n, m in MECHANISMS.items() if issubclass(m.config, ScoreConfig))
    raise ValueError(
        f"ScoreConfig.score={short(name)} is no score of @ha.score's; allowed: {', '.join(known) or 'none yet'}; "
        "import the module that defines it first"
    )


def check_count(config: ScoreConfig, name: str, heads: int) -> None:
    """Refuse values for another number of heads than there are."""
    value = getattr(config, name)
    if isinstance(value, tuple) and len(value) != heads:
        config._refuse(name, f"a number, or one for every query head, {heads}")


def score(
    name: str, *, statistics: Mapping[str, Callable[..., Tensor]] | None = None, paper: str = ""
) -> Callable[[Function], Function]:
    """Register a score under a name: a mechanism like ours, from a function of one pair. For example::

        @ha.score("kerple")
        def kerple(dot, query_position, key_position, height=1.0, slope=0.1):
            return dot - height * torch.log1p(slope * (query_position - key_position).abs())

    Then `attn_implementation="kerple"`, `ha.patch_model(model, ha.ScoreConfig("kerple"))` and
    `ha.functional.scored_attention(query, key, value, score="kerple")` run it. It is traced here and once; engines
    compile what the trace shows, forward and backward. docs/your_own_score.md has the whole story.

    Args:
        name: lower-case letters, digits and underscores; no mechanism or attention of Transformers has it.
        statistics: functions from vectors [..., d] to numbers [...], in plain torch; "last" is read as `query_last` and
            `key_last`. Their arguments with a default are vectors that every query head learns, [H, d], from that
            number in all dimensions.
        paper: title and arXiv number, for lists and cards.

    Returns:
        A decorator that returns the function as it is. The function's arguments name what it reads: `dot`,
        `squared_distance`, `query_norm`, `key_norm`, `query_position`, `key_position`, statistics, and with a default
        its parameters: every query head learns its own from that value (keeping its sign where that is not 0);
        arguments after a `*` are constants.

    Raises:
        ValueError: the name is taken, an argument is unknown, a parameter is not used, or the function is no plain
            arithmetic on a pair; one line.
    """

    def register_score(function: Function) -> Function:
        d = define(name, function, statistics or {})
        setattr(function, SCORE_NAME, name)
        if already_registered(d):
            return function
        config = make_config(d)
        start, cross_attention = config(name), not d.reads_positions
        register_term(make_term(d))
        register(
            Mechanism(
                name,
                "score",
                paper,
                config,
                PairLayer,
                names={name: start},
                cross_attention=cross_attention,
            )
        )
        return function

    return register_score


def make_config(d: Definition) -> type[ScoreConfig]:
    """The config class, with a field for each parameter."""
    fields: list[Any] = [
        ("score", str, option(d.name, "the name that the score is registered under"))
    ]
    for name, value in d.parameters.items():
        what = "constant" if name in d.constants else "where the parameter starts"
        fields.append(
            (
                name,
                Any,
                option(value, f"{what}: a number, or one for every head", types=(float, tuple)),
            )
        )
    for name, value in d.vectors.items():
        fields.append((name, float, option(value, "where all numbers of the vector start")))
    about = inspect.getdoc(d.function) or f"The score {d.name}."
    namespace = {
        "mechanism": d.name,
        "definition": d,
        "__doc__": about,
        "__module__": d.function.__module__,
    }
    return make_dataclass(
        "ScoreConfig", fields, bases=(ScoreConfig,), frozen=True, namespace=namespace
    )


def already_registered(d: Definition) -> bool:
    """Whether this very score is registered: a module that is imported again, a cell that is run again.

    Raises:
        ValueError: something else has its name.
    """
    there = MECHANISMS.get(d.name)
    if there is not None and issubclass(there.config, ScoreConfig):
        other = there.config.definition
        alike = ("formula", "parameters", "vectors")
        if all(getattr(other, name) == getattr(d, name) for name in alike):
            return True
        raise ValueError(
            f"score {d.name!r} is registered already, by {other.defined_in} with another formula or other starting "
            "values; give one of them another name, or start Python anew"
        )
    if (
        there is not None
        or d.name in TERMS
        or d.name in ("eager", *AttentionInterface().valid_keys())
    ):
        raise ValueError(f"score {d.name!r} has a name that is taken; choose another one")
    return False


def define(
    name: str, function: Callable[..., Tensor], statistics: Mapping[str, Callable[..., Tensor]]
) -> Definition:
    """A checked definition."""
    owner = f"score {short(name)}"
    if (
        not isinstance(name, str)
        or not re.fullmatch("[a-z][a-z0-9_]*", name)
        or any(r in name for r in RESERVED)
    ):
        raise ValueError(
            f"{owner} is no name; allowed: lower-case letters, digits and underscores, without {', '.join(RESERVED)}"
        )
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    if {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    } & {*kinds.values()}:
        raise ValueError(
            f"{owner} takes *, ** or positional-only arguments; allowed: arguments that name what it reads"
        )
    defaults = starts(owner, function)
    reserved = next((n for n in defaults if n in TAKEN or hasattr(ScoreConfig, n)), None)
    if reserved is not None:
        raise ValueError(
            f"{owner} has a parameter {reserved!r}, a name that configs and calls need; choose another one"
        )
    named = {*statistics, "norm", "position"}
    allowed = {*PAIR, *(side + n for side in SIDES for n in named)}
    reads = tuple(n for n in kinds if n not in defaults)
    unknown = next((n for n in kinds if (n in allowed) == (n in defaults)), None)
    if unknown is not None:
        what = "has a default" if unknown in allowed else "is unknown and has no default"
        raise ValueError(
            f"{owner} takes the argument {unknown!r}, which {what}; allowed: {', '.join(sorted(allowed))}, and "
            "parameters, which have a default: where they start"
        )
    vectors: dict[str, float] = {}
    for key, statistic in statistics.items():
        if not key.isidentifier() or key in ("norm", "position", "square"):
            raise ValueError(
                f"{owner} has a statistic {key!r}; allowed: other names than norm, position, square"
            )
        if not any(side + key in reads for side in SIDES):
            raise ValueError(
                f"{owner} does not read its statistic {key!r}; take query_{key} or key_{key}, or leave it out"
            )
        own = starts(f"{owner}'s statistic {key}", statistic)
        if own.keys() & (defaults.keys() | vectors.keys() | {*TAKEN}) or any(
            isinstance(v, tuple) for v in own.values()
        ):
            raise ValueError(
                f"{owner} has in its statistic {key!r} a parameter with a name that is taken, or that is no number"
            )
        vectors |= own  # type: ignore[arg-type]
    square = ("square",) * ("squared_distance" in reads)
    sides = tuple(
        square + tuple(n.removeprefix(p) for n in reads if n.startswith(p) and n not in PAIR)
        for p in SIDES
    )
    constants = {n: v for n, v in defaults.items() if kinds[n] == inspect.Parameter.KEYWORD_ONLY}
    learned = {n: v for n, v in defaults.items() if n not in constants}
    d = Definition(name, function, dict(statistics), reads, sides, learned, constants, vectors)  # type: ignore[arg-type]
    return replace(d, formula=formula_of(d))


def starts(owner: str, function: Callable) -> dict[str, Start]:
    """The defaults of a function's arguments, which must be finite numbers, or a tuple of them."""
    found = {}
    for p in inspect.signature(function).parameters.values():
        if p.default is not inspect.Parameter.empty:
            for number in p.default if isinstance(p.default, tuple) and p.default else (p.default,):
                check_number(f"{owner}: {p.name}", number)
            found[p.name] = p.default
    return found


def formula_of(d: Definition) -> str:
    """A hash of a definition's graph, and of its statistics' values at a few vectors.

    Raises:
        ValueError: it cannot be traced, does not tell keys apart, or does not depend on a parameter.
    """
    t = trace_term(make_term(d))
    owner, leaves = f"score {d.name!r}", {n for n in sort_ancestors([t.logit]) if n.op in LEAVES}
    if not any(n.op in ("dot", "squared_distance", "column") for n in leaves):
        raise ValueError(
            f"{owner} does not depend on the key, so that it changes nothing; read the key, or the pair"
        )
    slopes = {
        n
        for n, slope in compute_gradients(
            (t.logit, None, t.graph.add_node("local", value=GRAD))
        ).items()
    }
    for i, name in enumerate(d.learned):
        if t.graph.add_node("head", value=i) not in slopes:
            raise ValueError(
                f"{owner} does not depend on its parameter {name!r}; use it, or leave it out"
            )
    numbers = {n: i for i, n in enumerate(reversed(sort_ancestors([t.logit])))}
    lines = [f"{n.op} {[numbers[a] for a in n.args]} {n.value}" for n in numbers]
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).reshape(3, 8).sin()
    for key, statistic in d.statistics.items():
        vectors = {
            n: torch.linspace(0.5, 1.5, 8, dtype=torch.float64) for n in vectors_of(statistic)
        }
        found = statistic(x, **vectors)
        if not isinstance(found, Tensor) or found.shape != x.shape[:-1]:
            what = (
                f"shape {tuple(found.shape)}"
                if isinstance(found, Tensor)
                else f"type {type(found).__name__}"
            )
            raise ValueError(
                f"{owner}'s statistic {key!r} gives {what} of vectors [3, 8]; allowed: one number each, [3]"
            )
        if not torch.allclose(statistic(x[1:], **vectors), found[1:], rtol=1e-9, atol=1e-12):
            raise ValueError(
                f"{owner}'s statistic {key!r} of a vector depends on others; allowed: functions of one vector alone, "
                "since padding and caches change which others there are"
            )
        lines.append(f"{key} " + " ".join(f"{v:.6e}" for v in found.tolist()))
    return hashlib.sha256("\n".join([*map(str, d.sides), *lines]).encode()).hexdigest()[:16]


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    score: str | Callable[..., Tensor],
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    backend: str = "auto",
    **parameters: float | Tensor,
) -> Tensor:
    """softmax(S)·V with a score that `@ha.score` registered.

    Args:
        query: [B, H, N, d], any floating dtype; d at least 2. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]. A query that sees no key gives 0.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i; intersects with `attn_mask`.
        scale: above 0; vectors count times its root, so that the score's `dot` is scale · q·k; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        score: its name, or the function itself.
        query_positions: [N] or [B, N], of a score that reads positions; None: 0, 1, 2, ... They get no gradient.
        key_positions: [M] or [B, M], likewise.
        backend: "auto" or the name of an engine.
        **parameters: of the score, a float or a tensor of one value per query head, vectors [H, d]; where one is not
            there its definition's start is taken. Gradients reach them.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    if callable(score):
        score = getattr(score, SCORE_NAME, getattr(score, "__name__", ""))
    d, (batch, heads, n, width) = config_of(score).definition, query.shape
    factor: float = float(width) ** -0.5 if scale is None else scale
    if not factor > 0:
        refuse("scale", factor, "numbers above 0, or None")
    reads_positions = d.reads_positions
    unknown = next((name for name in parameters if name not in d.parameters | d.vectors), None)
    if unknown is None and not reads_positions:
        unknown = (
            "query_positions"
            if query_positions is not None
            else None
            if key_positions is None
            else "key_positions"
        )
    if unknown is not None:
        known = [*d.parameters, *d.vectors, *["query_positions", "key_positions"] * reads_positions]
        raise ValueError(
            f"score {d.name!r} has no {unknown!r}; allowed: {', '.join(known) or 'no parameters'}"
        )
    values: dict[str, Any] = {}
    for name, start in (d.parameters | d.vectors).items():
        number: Any = parameters.get(name, start)
        number = (
            torch.tensor(number, device=query.device, dtype=torch.float64)
            if isinstance(number, tuple)
            else number
        )
        if name in d.vectors and isinstance(number, Tensor) and number.shape == (heads, width):
            values[name] = number
        else:
            values[name] = check_parameter(name, number, heads, query, least=-LARGEST)
            values[name] = (
                values[name] if name in d.parameters else values[name][:, None].expand(heads, 1)
            )
    positions = None
    if reads_positions:
        positions = (
            checked_positions("query_positions", query_positions, n, batch, query.device),
            checked_positions("key_positions", key_positions, key.shape[2], batch, query.device),
        )
    pair = PairSpace(d, values, factor, positions).score(
        upcast_for_grad(query), upcast_for_grad(key)
    )
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    out, _ = attention(pair, value, options, backend=backend)
    return out.to(query.dtype)
