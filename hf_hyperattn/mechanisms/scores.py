"""`@ha.score`: register your own attention score, written as plain torch arithmetic on one pair.

Read this file to see how such a function becomes a config, a layer and a functional call;
docs/your_own_score.md shows how to use them. The function is traced once, when it is defined, and
compiled engines emit their code from that graph (engines/trace.py).

The names of the function's arguments say what it reads. Vectors are multiplied by the square root
of the layer's scale, so that `dot` is the model's own attention logit:

    dot                             scale · q·k
    squared_distance                |q - k|², from differences for pairs that nearly coincide
    query_norm, key_norm            |q| and |k|, at least 1e-12
    query_position, key_position    positions of the tokens in their row, without a gradient
    query_<name>, key_<name>        a statistic that the author defines
    arguments with a default        parameters, learned per query head from that value
    arguments after a `*`           constants
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
from ..config.fields import LARGEST, refuse
from ..config.registry import MECHANISMS, Mechanism, register
from ..engines import Options, register_term
from ..engines.score import TERMS
from ..engines.trace import GRAD, Traced, compute_gradients, sort_ancestors, trace_term
from ..utils.text import short
from .base import Host, HostCall
from .checks import check_call, check_number, check_parameter
from .pair_score import SIDES, Definition, PairSpace, Start, make_term, read_vector_names
from .positions import check_call_positions, read_positions
from .score_layer import ScoreLayer, attend_in_space

logger = logging.getLogger("hf_hyperattn")

#: Names that a parameter must not have: arguments of `scored_attention`, and keys of saved records.
TAKEN = (
    "query key value attn_mask dropout_p is_causal scale enable_gqa score query_positions key_positions backend "
    "definition defined_in formula"
).split()
#: Attribute that marks a registered function with the name of its score.
SCORE_NAME = "hf_hyperattn_score"
#: Arguments that belong to a pair, not to its query or its key.
PAIR = ("dot", "squared_distance")
#: Transformers treats attention implementations with these substrings in a special way.
RESERVED = ("flash", "sdpa", "flex_attention", "paged")
Function = TypeVar("Function", bound=Callable[..., Tensor])


class PairLayer(ScoreLayer):
    """The layer of a score from `@ha.score`, see `ScoreLayer`.

    Besides the gate it has one parameter for each number that the score learns, all zero at first:

    - `log_<name>` [H]: logarithm of the number divided by its start.
    - `added_<name>` [H]: the number itself, if its start is 0.
    - `added_<name>` [H, d]: the difference of a vector from its start.
    """

    reads_call = True
    config: ScoreConfig

    def __init__(self, config: ScoreConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.host = host
        d = config.definition
        # `read_positions` counts the keys of a row, and refuses a cache that was pruned.
        self.counts_keys = d.reads_positions
        if host is not None:
            for name in d.parameters:
                check_count(config, name, host.heads)
        for name in d.learned:
            setattr(self, config.parameter_name(name), self.per_head(host))
        for name in d.vectors:
            added = None
            if host is not None:
                if host.head_dim is None:
                    raise ValueError(
                        f"{config.mechanism} needs the head dimension of {host.name}, and nothing tells it; allowed: "
                        "attention layers with projections of queries and keys, choose them with layers=..."
                    )
                added = nn.Parameter(torch.zeros(host.heads, host.head_dim))
            setattr(self, f"added_{name}", added)

    def make_space(self, call: HostCall, dtype: torch.dtype) -> PairSpace:
        """Return the score with its current numbers, for one call.

        Args:
            call: Call of the attention layer.
            dtype: Dtype of the numbers.

        Raises:
            ValueError: The scale is not positive, or the config has numbers for another head count.
        """
        config = self.config
        d = config.definition
        # Vectors are multiplied by the root of the scale.
        if not call.scale > 0:
            where = "this layer" if self.host is None else self.host.name
            raise ValueError(
                f"{config.mechanism} is a score of scaled vectors, and {where} has scale {call.scale}"
            )
        values: dict[str, Any] = {}
        for name in d.parameters:
            value: Any = getattr(config, name)
            if isinstance(value, tuple):
                # A layer that is used by name has no host, so its head count is only known now.
                check_count(config, name, call.total_heads)
                value = self.make_start(value, call, dtype)
            moved = getattr(self, config.parameter_name(name)) if name in d.learned else None
            if moved is not None:
                if config.starts_at_zero(name):
                    value = value + moved.to(dtype)
                else:
                    value = value * torch.exp(moved.to(dtype))
            values[name] = value
        for name in d.vectors:
            start = getattr(config, name)
            moved = getattr(self, f"added_{name}")
            values[name] = start if moved is None else start + moved.to(dtype)
        positions = read_positions(call, self.host, d.name) if d.reads_positions else None
        return PairSpace(definition=d, values=values, scale=call.scale, positions=positions)


@dataclass(frozen=True, init=False)
class ScoreConfig(MechanismConfig):
    """Configuration of a score that `@ha.score` registered: `ScoreConfig("my_score", slope=0.2)`.

    Args:
        score: Name of the score.
        **parameters: Starting values, instead of the definition's. Each is a number, or a sequence
            with one number per query head.
    """

    score: str = option("", "the name that the score is registered under")

    if TYPE_CHECKING:
        definition: ClassVar[Definition]  # set by `make_config`

        def __init__(self, score: str, **parameters: float | Sequence[float]) -> None: ...

    else:

        def __new__(cls, score="", **parameters):
            # Every score has its own subclass, whose fields are the score's parameters.
            own = find_config(score) if cls is ScoreConfig else cls
            return super().__new__(own, score=score, **parameters)

    def __post_init__(self):
        d = self.definition
        if self.score != d.name:
            self._refuse("score", repr(d.name))
        for name in d.parameters:
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        super().__post_init__()
        for name in d.learned:
            value = getattr(self, name)
            # One parameter holds all heads, and it is either a logarithm or a sum. A head that starts
            # at 0 could not move by a factor.
            if isinstance(value, tuple) and 0 in value and any(value):
                self._refuse(
                    name, "a number, or one for every query head, not 0 for some of them alone"
                )

    def __reduce__(self):
        # Pickle cannot import the generated subclass, so the record makes it again.
        return MechanismConfig.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the score's module and the hash of its formula."""
        values = super().to_dict()
        # The mechanism's name is the same.
        del values["score"]
        values["defined_in"] = self.definition.defined_in
        values["formula"] = self.definition.formula
        return values

    @classmethod
    def checked_record(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record; warn if it was saved with another formula."""
        formula = data.get("formula")
        if formula is not None and formula != cls.definition.formula:
            warn_of_formula(cls.definition, short(formula))
        return {k: v for k, v in data.items() if k not in ("defined_in", "formula")}

    def starts_at_zero(self, name: str) -> bool:
        """Return whether a parameter starts at 0.

        It is then learned by addition. Other parameters are learned by a factor and keep their
        sign.
        """
        value = getattr(self, name)
        return not any(value) if isinstance(value, tuple) else not value

    def parameter_name(self, name: str) -> str:
        """Return the name of a learned parameter in the state dict."""
        return f"added_{name}" if self.starts_at_zero(name) else f"log_{name}"


def warn_of_formula(d: Definition, formula: str) -> None:
    """Warn that a checkpoint was saved with another formula.

    Args:
        d: The registered definition.
        formula: Hash in the checkpoint.
    """
    logger.warning(
        f"score {d.name!r} of {d.defined_in} computes another formula ({d.formula!r}) than the one that this was saved "
        f"with ({formula}): outputs differ, unless its form alone has changed; put it back, or save the model again"
    )


def find_config(name: object) -> type[ScoreConfig]:
    """Return the config class of a score.

    Raises:
        ValueError: No score has that name.
    """
    # Callers may pass anything, also objects without a hash.
    if isinstance(name, str) and name in MECHANISMS:
        config = MECHANISMS[name].config
        if issubclass(config, ScoreConfig):
            return config
    known = sorted(n for n, m in MECHANISMS.items() if issubclass(m.config, ScoreConfig))
    raise ValueError(
        f"ScoreConfig.score={short(name)} is no score of @ha.score's; allowed: {', '.join(known) or 'none yet'}; "
        "import the module that defines it first"
    )


def check_count(config: ScoreConfig, name: str, heads: int) -> None:
    """Raise if a config has one number per head, but for another head count."""
    value = getattr(config, name)
    if isinstance(value, tuple) and len(value) != heads:
        config._refuse(name, f"a number, or one for every query head, {heads}")


def score(
    name: str, *, statistics: Mapping[str, Callable[..., Tensor]] | None = None, paper: str = ""
) -> Callable[[Function], Function]:
    """Register a function of one pair as an attention score. For example::

        @ha.score("kerple")
        def kerple(dot, query_position, key_position, height=1.0, slope=0.1):
            return dot - height * torch.log1p(slope * (query_position - key_position).abs())

    Then `attn_implementation="kerple"`, `ha.patch_model(model, ha.ScoreConfig("kerple"))` and
    `ha.functional.scored_attention(query, key, value, score="kerple")` use it. The function is
    traced once, when it is registered. Engines compile the trace, forward and backward.
    docs/your_own_score.md explains it step by step.

    The names of the function's arguments say what it reads: `dot`, `squared_distance`,
    `query_norm`, `key_norm`, `query_position`, `key_position`, and statistics. Arguments with a
    default are parameters. Each query head learns its own value from the default. The value keeps
    its sign, unless it starts at 0. Arguments after a `*` are constants.

    Args:
        name: Lower-case letters, digits and underscores. No other mechanism, and no attention of
            Transformers, may have this name.
        statistics: Functions in plain torch from vectors [..., d] to numbers [...], by name. The
            statistic "last" is read as `query_last` and `key_last`. Arguments of a statistic with a
            default are vectors [H, d]. Each query head learns its own; all dimensions start at the
            default. Default: no statistics.
        paper: Title and arXiv number, for lists and model cards. Default: none.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: The name is taken, an argument is unknown, a parameter is not used, or the
            function is not plain arithmetic on a pair. The message is one line.
    """

    def register_score(function: Function) -> Function:
        d = make_definition(name, function, statistics or {})
        # Callers of `scored_attention` may pass the function instead of its name.
        setattr(function, SCORE_NAME, name)
        if already_registered(d):
            return function
        config = make_config(d)
        # Made first, because a wrong start raises and must leave nothing registered.
        start = config(name)
        register_term(make_term(d))
        register(
            Mechanism(
                name=name,
                stage="score",
                paper=paper,
                config=config,
                layer=PairLayer,
                names={name: start},
                # Queries of cross-attention have no position among the keys.
                cross_attention=not d.reads_positions,
            )
        )
        return function

    return register_score


def make_config(d: Definition) -> type[ScoreConfig]:
    """Return a new config class with one field per parameter.

    Args:
        d: Definition of the score.
    """
    fields: list[Any] = [
        ("score", str, option(d.name, "the name that the score is registered under"))
    ]
    for name, value in d.parameters.items():
        kind = "constant" if name in d.constants else "where the parameter starts"
        about = f"{kind}: a number, or one for every head"
        fields.append((name, Any, option(value, about, types=(float, tuple), per_head=True)))
    # Vectors have a dimension that the config does not know, so all of it starts at one number.
    for name, value in d.vectors.items():
        fields.append((name, float, option(value, "where all numbers of the vector start")))
    namespace = {
        "mechanism": d.name,
        "definition": d,
        "__doc__": inspect.getdoc(d.function) or f"The score {d.name}.",
        "__module__": d.function.__module__,
    }
    return make_dataclass(
        "ScoreConfig", fields, bases=(ScoreConfig,), frozen=True, namespace=namespace
    )


def already_registered(d: Definition) -> bool:
    """Return whether this very score is registered.

    That is so if its module is imported again, or its notebook cell is run again.

    Raises:
        ValueError: Another score, mechanism, term or attention implementation has its name.
    """
    there = MECHANISMS.get(d.name)
    if there is not None and issubclass(there.config, ScoreConfig):
        other = there.config.definition
        # Functions are not compared: a module that is imported again makes new ones.
        alike = ("formula", "parameters", "vectors")
        if all(getattr(other, name) == getattr(d, name) for name in alike):
            return True
        raise ValueError(
            f"score {d.name!r} is registered already, by {other.defined_in} with another formula or other starting "
            "values; give one of them another name, or start Python anew"
        )
    # "eager" is a name of Transformers that its registry does not list.
    taken = d.name in TERMS or d.name in ("eager", *AttentionInterface().valid_keys())
    if there is not None or taken:
        raise ValueError(f"score {d.name!r} has a name that is taken; choose another one")
    return False


def make_definition(
    name: str, function: Callable[..., Tensor], statistics: Mapping[str, Callable[..., Tensor]]
) -> Definition:
    """Check a score and return its definition, with the hash of its formula.

    Args:
        name: Name of the score.
        function: Function of one pair.
        statistics: Functions of one vector, by name.

    Raises:
        ValueError: See `score`.
    """
    owner = f"score {short(name)}"
    check_name(owner, name)
    kinds = read_kinds(owner, function)
    defaults = read_starts(owner, function)
    check_arguments(owner, kinds, defaults, statistics)
    reads = tuple(n for n in kinds if n not in defaults)
    vectors = read_vectors(owner, reads, defaults, statistics)

    # A distance needs |q|² and |k|². `PairDistanceTerm` expects them first.
    square = ("square",) if "squared_distance" in reads else ()
    by_side = ([n.removeprefix(side) for n in reads if n.startswith(side)] for side in SIDES)
    query_side, key_side = ((*square, *names) for names in by_side)
    keyword_only = {n for n, kind in kinds.items() if kind == inspect.Parameter.KEYWORD_ONLY}
    d = Definition(
        name=name,
        function=function,
        statistics=dict(statistics),
        reads=reads,
        sides=(query_side, key_side),
        learned={n: v for n, v in defaults.items() if n not in keyword_only},
        constants={n: v for n, v in defaults.items() if n in keyword_only},
        vectors=vectors,
    )
    return replace(d, formula=hash_formula(d))


def check_name(owner: str, name: object) -> None:
    """Raise unless `name` can name a score.

    Args:
        owner: The score, for the message.
        name: Its name.
    """
    fits = isinstance(name, str) and re.fullmatch("[a-z][a-z0-9_]*", name)
    if not fits or any(r in str(name) for r in RESERVED):
        raise ValueError(
            f"{owner} is no name; allowed: lower-case letters, digits and underscores, without {', '.join(RESERVED)}"
        )


def read_kinds(owner: str, function: Callable) -> dict[str, Any]:
    """Return the kind of each argument of a score's function, see `inspect.Parameter.kind`.

    Raises:
        ValueError: An argument cannot be passed by its name.
    """
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    nameless = {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    }
    if nameless & {*kinds.values()}:
        raise ValueError(
            f"{owner} takes *, ** or positional-only arguments; allowed: arguments that name what it reads"
        )
    return kinds


def read_starts(owner: str, function: Callable) -> dict[str, Start]:
    """Return the defaults of a function's arguments.

    Raises:
        ValueError: A default is neither a finite number nor a tuple of finite numbers.
    """
    defaults = {}
    for p in inspect.signature(function).parameters.values():
        if p.default is inspect.Parameter.empty:
            continue
        # An empty tuple is checked as if it were a number, and raises.
        several = isinstance(p.default, tuple) and p.default
        for number in p.default if several else (p.default,):
            check_number(f"{owner}: {p.name}", number)
        defaults[p.name] = p.default
    return defaults


def check_arguments(
    owner: str, kinds: Mapping[str, Any], defaults: Mapping[str, Start], statistics: Mapping
) -> None:
    """Raise unless every argument is known, or is a parameter with a free name.

    Args:
        owner: The score, for the message.
        kinds: Arguments of its function, from `read_kinds`.
        defaults: Defaults of its parameters, from `read_starts`.
        statistics: Functions of one vector, by name.
    """
    reserved = next((n for n in defaults if n in TAKEN or hasattr(ScoreConfig, n)), None)
    if reserved is not None:
        raise ValueError(
            f"{owner} has a parameter {reserved!r}, a name that configs and calls need; choose another one"
        )
    allowed = {*PAIR, *(side + n for side in SIDES for n in (*statistics, "norm", "position"))}
    # Known names must have no default, all other names must have one.
    wrong = next((n for n in kinds if (n in allowed) == (n in defaults)), None)
    if wrong is not None:
        fault = "has a default" if wrong in allowed else "is unknown and has no default"
        raise ValueError(
            f"{owner} takes the argument {wrong!r}, which {fault}; allowed: {', '.join(sorted(allowed))}, and "
            "parameters, which have a default: where they start"
        )


def read_vectors(
    owner: str, reads: Sequence[str], defaults: Mapping[str, Start], statistics: Mapping
) -> dict[str, float]:
    """Check the statistics and return the starts of their vectors.

    Args:
        owner: The score, for the message.
        reads: Arguments of its function without a default.
        defaults: Defaults of its other arguments.
        statistics: Functions of one vector, by name.

    Raises:
        ValueError: A statistic has a name that is taken or is not read, or one of its vectors has.
    """
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
        own = read_starts(f"{owner}'s statistic {key}", statistic)
        # All parameters of a score share the fields of its config.
        taken = own.keys() & (defaults.keys() | vectors.keys() | {*TAKEN})
        if taken or any(isinstance(v, tuple) for v in own.values()):
            raise ValueError(
                f"{owner} has in its statistic {key!r} a parameter with a name that is taken, or that is no number"
            )
        vectors |= own  # type: ignore[arg-type]
    return vectors


def hash_formula(d: Definition) -> str:
    """Return a hash of a definition's graph and statistics.

    Statistics are any torch code, so their values at a few vectors stand for them.

    Raises:
        ValueError: The function cannot be traced, is the same for all keys, or does not depend on a
            parameter; or a statistic is not a function of one vector.
    """
    t = trace_term(make_term(d))
    check_dependence(d, t)
    # Numbered by their order in the graph, so that names of variables do not change the hash.
    numbers = {n: i for i, n in enumerate(reversed(sort_ancestors([t.logit])))}
    lines = [*map(str, d.sides)]
    lines += [f"{n.op} {[numbers[a] for a in n.args]} {n.value}" for n in numbers]
    for key, statistic in d.statistics.items():
        values = probe_statistic(f"score {d.name!r}'s statistic {key!r}", statistic)
        # Seven digits, because machines round differently.
        lines.append(f"{key} " + " ".join(f"{v:.6e}" for v in values.tolist()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_dependence(d: Definition, t: Traced) -> None:
    """Raise unless a score depends on the key and on all its parameters.

    Args:
        d: Definition of the score.
        t: Its graph.
    """
    owner = f"score {d.name!r}"
    # Softmax ignores a logit that is the same for all keys.
    if not any(n.op in ("dot", "squared_distance", "column") for n in sort_ancestors([t.logit])):
        raise ValueError(
            f"{owner} does not depend on the key, so that it changes nothing; read the key, or the pair"
        )
    # A parameter without a slope in the graph would never get a gradient.
    slopes = compute_gradients((t.logit, None, t.graph.add_node("local", value=GRAD)))
    for i, name in enumerate(d.learned):
        if t.graph.add_node("head", value=i) not in slopes:
            raise ValueError(
                f"{owner} does not depend on its parameter {name!r}; use it, or leave it out"
            )


def probe_statistic(owner: str, statistic: Callable[..., Tensor]) -> Tensor:
    """Return the values of a statistic at three fixed vectors of 8 dimensions, [3].

    Args:
        owner: The statistic, for the message.
        statistic: The function.

    Raises:
        ValueError: It does not return one number per vector, or reads several vectors for one.
    """
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).reshape(3, 8).sin()
    weights = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    vectors = dict.fromkeys(read_vector_names(statistic), weights)
    values = statistic(x, **vectors)
    if not isinstance(values, Tensor) or values.shape != x.shape[:-1]:
        is_tensor = isinstance(values, Tensor)
        fault = f"shape {tuple(values.shape)}" if is_tensor else f"type {type(values).__name__}"
        raise ValueError(f"{owner} gives {fault} of vectors [3, 8]; allowed: one number each, [3]")
    # Without the first vector, the values of the other two must stay as they are.
    if not torch.allclose(statistic(x[1:], **vectors), values[1:], rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"{owner} of a vector depends on others; allowed: functions of one vector alone, "
            "since padding and caches change which others there are"
        )
    return values


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
    """Return softmax(S)·V for a score S that `@ha.score` registered.

    Arithmetic is in float32, or in float64 for float64 inputs.

    Args:
        query: [B, H, N, d], any floating dtype; d at least 2.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], where Hkv divides H.
        value: [B, H or Hkv, M, dv].
        attn_mask: Bool (True = attend) or additive, broadcastable to [B, H, N, M]. A query that
            sees no key returns 0. Default: no mask.
        dropout_p: Probability that a weight is dropped, in [0, 1). Default: 0.
        is_causal: Whether query i sees only keys j <= i. Intersects with `attn_mask`.
        scale: Scale above 0. Vectors are multiplied by its root, so that the score's `dot` is
            scale · q·k. Default: 1/sqrt(d).
        enable_gqa: Whether keys and values may have fewer heads than queries.
        score: The score's name, or its function.
        query_positions: [N] or [B, N], for a score that reads positions. Positions get no gradient.
            Default: 0, 1, 2, ...
        key_positions: [M] or [B, M]. Default: 0, 1, 2, ...
        backend: "auto" (default) or the name of an engine.
        **parameters: Parameters of the score: a float, or a tensor with one value per query head;
            for a vector also [H, d]. They get gradients. Default: the starts in the definition.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: An argument is not allowed. The message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    if callable(score):
        score = getattr(score, SCORE_NAME, getattr(score, "__name__", ""))
    d = find_config(score).definition
    factor: float = float(query.shape[-1]) ** -0.5 if scale is None else scale
    # Vectors are multiplied by the root of the scale.
    if not factor > 0:
        refuse("scale", factor, "numbers above 0, or None")
    given = [*parameters]
    if query_positions is not None:
        given.append("query_positions")
    if key_positions is not None:
        given.append("key_positions")
    check_keywords(d, given)
    values = check_values(d, parameters, query)
    positions = None
    if d.reads_positions:
        positions = check_call_positions(query, key, query_positions, key_positions)
    space = PairSpace(definition=d, values=values, scale=factor, positions=positions)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    return attend_in_space(space, query, key, value, options, backend)


def check_keywords(d: Definition, given: Sequence[str]) -> None:
    """Raise if a call passes parameters or positions that its score does not have.

    Args:
        d: Definition of the score.
        given: Names that the call passes.
    """
    known = [*d.parameters, *d.vectors]
    if d.reads_positions:
        known += ["query_positions", "key_positions"]
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ValueError(
            f"score {d.name!r} has no {unknown!r}; allowed: {', '.join(known) or 'no parameters'}"
        )


def check_values(
    d: Definition, parameters: Mapping[str, float | Tensor], query: Tensor
) -> dict[str, Tensor]:
    """Return all numbers of a score for a call: parameters [H] or [1], vectors [H, d] or [H, 1].

    Args:
        d: Definition of the score.
        parameters: Numbers of the caller. Missing ones are the starts in the definition.
        query: [B, H, N, d].

    Raises:
        ValueError: A number is not finite, or a tensor has another shape.
    """
    _, heads, _, width = query.shape
    values: dict[str, Tensor] = {}
    for name, start in (d.parameters | d.vectors).items():
        number: Any = parameters.get(name, start)
        if isinstance(number, tuple):
            number = torch.tensor(number, device=query.device, dtype=torch.float64)
        is_matrix = isinstance(number, Tensor) and number.shape == (heads, width)
        if name in d.vectors and is_matrix:
            values[name] = number
            continue
        value = check_parameter(name, number, heads, query, least=-LARGEST)
        # One number per head stands for all dimensions of a vector.
        values[name] = value if name in d.parameters else value[:, None].expand(heads, 1)
    return values
