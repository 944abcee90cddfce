"""What a sparse rule is: which keys a query of one head looks at, and what it costs to find them.

A rule is a frozen dataclass, registered under a name by which configs keep it:

    @sparse_rule("every_other")
    @dataclass(frozen=True)
    class EveryOther(SparseRule):
        near: int = option(16, "tokens before a query that it sees", least=1)

        def share(self, length):
            return 0.5

        def visible(self, call):
            return (call.tokens > call.places - self.near) | (call.tokens % 2 == 0)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...engines import repeat_heads
from ...engines.score import working_dtype
from ...engines.selection import Rule
from ...fields import KnownFields, check_field, option, short
from ...readable import can_read
from ..selection.growing import TAKEN_BACK

#: Every rule's class, by the name in configs.
RULES: dict[str, type[SparseRule]] = {}
#: Rules that no kernel computes: the module of each in `mask_rules`, and its class, by the name in configs. They are
#: imported when somebody asks for them.
MASK_RULES = {
    "clusters": ("clusters", "Clusters"),
    "nested_windows": ("nested", "NestedWindows"),
    "vertical_slash": ("vertical_slash", "VerticalSlash"),
}
RuleClass = TypeVar("RuleClass", bound="type[SparseRule]")


@dataclass(frozen=True, eq=False)
class RuleCall:
    """What a rule is shown of a call.

    Args:
        query: [B, H, N, d], of consecutive tokens in every row; float32, or float64 where the call is.
        key: [B, H, M, d]; key j is token j of its row, padding left out. What comes after a row's last token is 0.
        scale: the logit is scale · q·k.
        place: int64 [B, N], which token of its row a query is; -1 for padding.
        window: the host's sliding window: token i sees tokens at a distance of less than `window`; None for all.
        earlier: so many of the first queries are there for the selection alone, and their rows are not looked at.
        lengths: int64 [B or 1], the tokens of each row, in a call whose queries see the tokens after them too; None in
            a causal call.
    """

    query: Tensor
    key: Tensor
    scale: float
    place: Tensor
    window: int | None = None
    earlier: int = 0
    lengths: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether queries see only tokens before them."""
        return self.lengths is None

    @property
    def tokens(self) -> Tensor:
        """[M], the number of each key."""
        return torch.arange(self.key.shape[2], device=self.key.device)

    @property
    def places(self) -> Tensor:
        """[B, 1, N, 1], the number of each query."""
        return self.place[:, None, :, None]

    def heads(self, index: list[int]) -> RuleCall:
        """The call of these heads alone."""
        return replace(self, query=self.query[:, index], key=self.key[:, index])

    def check(self, known: Tensor) -> None:
        """Raise where a query's selection reads earlier queries that nobody has kept.

        Args:
            known: bool [B, N], whether what a query's selection reads is there.
        """
        known = (known | (self.place < 0))[:, self.earlier :]
        if can_read(known) and not bool(known.all()):
            raise ValueError(
                "a sparse rule selects by queries before those of this call, which are not known: the cache was "
                "filled by another model, was put together from other tensors, rounds its keys, was cropped to more "
                f"than {TAKEN_BACK} tokens before the most that it held, or was filled under a 4D mask that showed a "
                "row no key; allowed: query='own', a 2D attention_mask, or a cache of full precision that this model "
                "filled"
            )


class SparseRule(KnownFields, Rule):
    """Which keys a query of one head looks at. Subclasses are frozen dataclasses under `sparse_rule`."""

    name: ClassVar[str] = ""

    def __post_init__(self):
        for f in fields(self):  # type: ignore[arg-type]
            if f.metadata:
                check_field(type(self).__name__, f.name, getattr(self, f.name), f.metadata)

    @abstractmethod
    def visible(self, call: RuleCall) -> Tensor:
        """Bool, broadcastable to [B, H, N, M]: the keys that each query sees. In a causal call, what comes after a
        query may be anything.
        """

    @torch.no_grad()
    def mask(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        first: int = 0,
        earlier: int = 0,
        is_causal: bool = True,
    ) -> Tensor:
        """The rule as a mask, causality included, of a text without padding.

        Args:
            query: [B, H, N, d], tokens `first`, `first` + 1, ... of the text.
            key: [B, H or Hkv, M, d], tokens 0 ... M - 1.
            scale: None: 1/sqrt(d).
            first: the token of the first query.
            earlier: so many of the first queries are there for the selection alone.
            is_causal: whether queries see only tokens before them; if not, all queries of the text are given.

        Returns:
            Bool [B, H, N - earlier, M].
        """
        place = torch.arange(first, first + query.shape[2], device=query.device).expand(
            len(query), -1
        )
        scale = float(query.shape[-1] ** -0.5) if scale is None else scale
        dtype = working_dtype(query, key)
        key = repeat_heads(key, query.shape[1]).to(dtype)
        lengths = None if is_causal else torch.full((1,), key.shape[2], device=key.device)
        call = RuleCall(query.to(dtype), key, scale, place, earlier=earlier, lengths=lengths)
        seen = self.visible(call)
        if is_causal:
            seen = seen & (call.tokens <= call.places)
        return seen.expand(*query.shape[:3], key.shape[2])[:, :, earlier:]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the rule's name first."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]
        return {
            "rule": self.name,
            **{n: list(v) if isinstance(v, tuple) else v for n, v in values.items()},
        }

    @staticmethod
    def from_dict(data: Any) -> SparseRule:
        """The inverse of `to_dict`; unknown rules and fields, and values out of range, are refused."""
        if not isinstance(data, dict) or not isinstance(data.get("rule"), str):
            raise ValueError(f"a sparse rule is {short(data)}; allowed: a dict with the key 'rule'")
        cls = find_rule(data["rule"])
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        unknown = sorted(map(str, data.keys() - known.keys() - {"rule"}))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {short(unknown[0])}; allowed: {', '.join(sorted(known))}"
            )
        return cls(**{k: as_tuple(v) for k, v in data.items() if k != "rule"})


def find_rule(name: str) -> type[SparseRule]:
    """Return the class of the rule with this name in configs, imported if need be.

    Raises:
        ValueError: No rule is registered under the name.
    """
    if name in MASK_RULES:
        import_module(f"{__package__}.mask_rules.{MASK_RULES[name][0]}")
    if name not in RULES:
        known = ", ".join(sorted({*RULES, *MASK_RULES}))
        raise ValueError(
            f"sparse rule {short(name)} is unknown; allowed: {known}; for others, import the module that registers "
            "them first"
        )
    return RULES[name]


def import_mask_rule(class_name: str) -> type[SparseRule]:
    """Return the class of a rule without a kernel: `__getattr__` of the modules that export it.

    Raises:
        AttributeError: No such rule has this class name.
    """
    for name, (_, exported) in MASK_RULES.items():
        if exported == class_name:
            return find_rule(name)
    raise AttributeError(
        f"there is no {class_name!r} here; rules without a kernel: {', '.join(c for _, c in MASK_RULES.values())}"
    )


def as_tuple(value: Any) -> Any:
    """What a field held before JSON made lists of its tuples."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def check_rule(rule: SparseRule) -> None:
    """Raise for a rule that a saved model would lose, or bring back as another, or that changes while it is in use.

    Raises:
        ValueError: its class is not registered under a name of its own, or it cannot be hashed.
    """
    kind = type(rule)
    if RULES.get(kind.name) is not kind:
        raise ValueError(
            f"the sparse rule {kind.__name__} has no name of its own, by which a saved model keeps it; decorate the "
            "class with @sparse_rule('a_name')"
        )
    if torch.compiler.is_compiling():
        # The compiler of torch 2.11 cannot follow `hash`. A rule without one fails later in the call, in a set.
        return
    try:
        hash(rule)
    except TypeError as error:
        raise ValueError(
            f"the sparse rule {kind.__name__} cannot be hashed ({error}); make it a @dataclass(frozen=True), with "
            "tuples in place of lists"
        ) from error


def sparse_rule(name: str) -> Callable[[RuleClass], RuleClass]:
    """A class decorator that makes a rule known, so that configs with it are saved and loaded.

    Args:
        name: what the rule is called in JSON; a second rule of the same name is refused.
    """

    def registered(cls: RuleClass) -> RuleClass:
        # A module of `mask_rules` registers its rule when it is imported; nobody else may take that name.
        is_own = name in MASK_RULES and cls.__module__.startswith(f"{__package__}.mask_rules.")
        if name in RULES or (name in MASK_RULES and not is_own):
            raise ValueError(f"sparse rule {name!r} is registered already; choose another name")
        cls.name = name
        RULES[name] = cls
        return cls

    return registered


@sparse_rule("exact")
@dataclass(frozen=True)
class Exact(SparseRule):
    """Ordinary attention: a query sees every token before it, and those after it where attention is not causal."""

    @property
    def is_exact(self) -> bool:
        """It is."""
        return True

    @property
    def only_causal(self) -> str:
        """Nothing."""
        return ""

    def share(self, length: int) -> float:
        """All of it."""
        return 1.0

    def share_both_sides(self, length: int) -> float:
        """All of it."""
        return 1.0

    def visible(self, call: RuleCall) -> Tensor:
        """Everything."""
        return torch.ones((), dtype=torch.bool, device=call.key.device)


@sparse_rule("window")
@dataclass(frozen=True)
class Window(SparseRule):
    """The nearest tokens, i - near < j <= i for token i, and the first, j < sinks (StreamingLLM, arXiv 2309.17453).

    In attention that is not causal the nearest tokens are those on both sides, |i - j| < near.
    """

    near: int = option(256, "tokens at a distance of less than this are seen", least=1)
    sinks: int = option(4, "so many first tokens of the text are seen", least=0)

    @property
    def only_causal(self) -> str:
        """Nothing."""
        return ""

    @property
    def reach(self) -> tuple[int, int]:
        """What is seen."""
        return self.near, self.sinks

    def share(self, length: int) -> float:
        """What is seen; nothing is looked for."""
        places = torch.arange(length)
        return share_of(
            places.clamp_max(self.near - 1) + 1 + (places - self.near + 1).clamp(0, self.sinks)
        )

    def share_both_sides(self, length: int) -> float:
        """What is seen, on both sides."""
        places = torch.arange(length)
        first = (places - self.near + 1).clamp_min(0)
        stop = (places + self.near).clamp_max(length)
        sinks = min(self.sinks, length)
        return share_of(
            stop - first + first.clamp_max(sinks) + (sinks - stop).clamp_min(0), is_causal=False
        )

    def visible(self, call: RuleCall) -> Tensor:
        """[B, 1, N, M]."""
        near = call.tokens > call.places - self.near
        if not call.is_causal:
            near = near & (call.tokens < call.places + self.near)
        return near | (call.tokens < self.sinks)


def share_of(counts: Tensor, is_causal: bool = True) -> float:
    """The share of logits, from how many each query computes: never more than it sees in ordinary attention.

    Args:
        counts: [length], of each query.
        is_causal: whether ordinary attention sees only tokens before a query.
    """
    length = len(counts)
    most = torch.arange(1, length + 1, dtype=torch.float64)
    if not is_causal:
        most = torch.full_like(most, length)
    return float(torch.minimum(counts.double(), most).sum() / most.sum()) if length else 1.0
