"""The interface of sparse rules, and the two simplest ones, `Exact` and `Window`.

A sparse rule says which keys a query of one head attends to, and how many logits that costs. It is
a frozen dataclass, registered under a name for configs:

    @sparse_rule("every_other")
    @dataclass(frozen=True)
    class EveryOther(SparseRule):
        near: int = option(16, "tokens at a distance of less than this are seen", least=1)

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

from ...config.fields import KnownFields, check_field, option
from ...engines import repeat_heads
from ...engines.score import working_dtype
from ...engines.selection import Rule
from ...utils.readable import can_read
from ...utils.text import short
from ..selection.growing import TAKEN_BACK

#: Every rule's class, by the name in configs.
RULES: dict[str, type[SparseRule]] = {}
#: Rules that no kernel computes: module in `mask_rules` and class, by the name in configs. They are
#: imported on first use, because most programs need none of them.
MASK_RULES = {
    "clusters": ("clusters", "Clusters"),
    "nested_windows": ("nested", "NestedWindows"),
    "vertical_slash": ("vertical_slash", "VerticalSlash"),
}
RuleClass = TypeVar("RuleClass", bound="type[SparseRule]")


@dataclass(frozen=True, eq=False)
class RuleCall:
    """The queries and keys of an attention call, as a rule sees them.

    Args:
        query: [B, H, N, d], of consecutive tokens in every row; float32, or float64 if the call is.
        key: [B, H, M, d]; key j is token j of its row, without padding. Zeros follow a row's last
            token.
        scale: The attention logit is scale · q·k.
        place: int64 [B, N], the number of each query's token in its row; -1 for padding.
        window: Sliding window of the attention layer: token i sees tokens at a distance of less
            than this. None: all.
        earlier: The first `earlier` queries are there for the selection only. Their rows of a mask
            are ignored.
        lengths: int64 [B or 1], the tokens of each row, in a call that is not causal; None in a
            causal call.
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
        """Whether queries see no token after them."""
        return self.lengths is None

    @property
    def tokens(self) -> Tensor:
        """int64 [M], the number of each key."""
        return torch.arange(self.key.shape[2], device=self.key.device)

    @property
    def places(self) -> Tensor:
        """int64 [B, 1, N, 1], the number of each query."""
        return self.place[:, None, :, None]

    def heads(self, index: list[int]) -> RuleCall:
        """Return the call with only these heads."""
        return replace(self, query=self.query[:, index], key=self.key[:, index])

    def check(self, known: Tensor) -> None:
        """Raise if a selection reads earlier queries that were not kept.

        Does nothing if the values cannot be read, as in compiled calls.

        Args:
            known: Bool [B, N], False at queries whose selection reads queries that are missing.

        Raises:
            ValueError: A real query of this call is not known.
        """
        # Padding selects nothing, and the results of earlier queries are not used.
        self.check_chosen((known | (self.place < 0))[:, self.earlier :])

    def check_chosen(self, known: Tensor) -> None:
        """Raise as `check` does if any element of `known` is False; of any shape."""
        if can_read(known) and not bool(known.all()):
            raise ValueError(
                "a sparse rule selects by queries before those of this call, which are not known: the cache was "
                "filled by another model, was put together from other tensors, rounds its keys, was cropped to more "
                f"than {TAKEN_BACK} tokens before the most that it held, or was filled under a 4D mask that showed a "
                "row no key; allowed: query='own', a 2D attention_mask, or a cache of full precision that this model "
                "filled"
            )


class SparseRule(KnownFields, Rule):
    """Base of sparse rules: which keys a query of one head attends to.

    Subclasses are frozen dataclasses, registered with `sparse_rule`.
    """

    name: ClassVar[str] = ""

    def __post_init__(self):
        # Fields without metadata were not made by `option`. Their rule checks them itself.
        for f in fields(self):  # type: ignore[arg-type]
            if f.metadata:
                check_field(type(self).__name__, f.name, getattr(self, f.name), f.metadata)

    @abstractmethod
    def visible(self, call: RuleCall) -> Tensor:
        """Return the keys that each query sees: bool, broadcastable to [B, H, N, M].

        In a causal call, entries for keys after a query are ignored.
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
        """Return the rule as a mask of a text without padding, causality included.

        Args:
            query: [B, H, N, d], tokens `first`, `first` + 1, ... of the text.
            key: [B, H or Hkv, M, d], tokens 0 ... M - 1.
            scale: The attention logit is scale · q·k; None: 1/sqrt(d).
            first: Token of the first query.
            earlier: The first `earlier` queries are there for the selection only.
            is_causal: Whether queries see no token after them. If not, pass all queries of the
                text.

        Returns:
            Bool [B, H, N - earlier, M].
        """
        place = torch.arange(first, first + query.shape[2], device=query.device)
        place = place.expand(len(query), -1)
        scale = float(query.shape[-1] ** -0.5) if scale is None else scale
        # As in a call: rules select in float32 at least, and see one key head for each query head.
        dtype = working_dtype(query, key)
        key = repeat_heads(key, query.shape[1]).to(dtype)
        lengths = None if is_causal else torch.full((1,), key.shape[2], device=key.device)
        call = RuleCall(
            query=query.to(dtype),
            key=key,
            scale=scale,
            place=place,
            earlier=earlier,
            lengths=lengths,
        )
        seen = self.visible(call)
        if is_causal:
            seen = seen & (call.tokens <= call.places)
        return seen.expand(*query.shape[:3], key.shape[2])[:, :, earlier:]

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON values, with its name first."""
        data: dict[str, Any] = {"rule": self.name}
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            value = getattr(self, name)
            data[name] = list(value) if isinstance(value, tuple) else value
        return data

    @staticmethod
    def from_dict(data: Any) -> SparseRule:
        """Return the rule that `to_dict` wrote.

        Raises:
            ValueError: The rule or a field is unknown, or a value is out of range.
        """
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
    """Return the class of the rule with this name in configs; import it if necessary.

    Raises:
        ValueError: No rule is registered under the name.
    """
    # The import registers the rule.
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
    """Return the class of a rule that has no kernel.

    Modules that export these rules use this function as their `__getattr__`.

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
    """Return the value that a field held before JSON turned its tuples into lists."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def check_rule(rule: SparseRule) -> None:
    """Raise if a rule cannot be saved and loaded, or cannot be hashed.

    Rules are keys of dicts and sets, which find heads with equal rules.

    Raises:
        ValueError: Its class is not registered under a name of its own, or it cannot be hashed.
    """
    kind = type(rule)
    # A subclass of a registered rule inherits its name, and would be loaded as its parent.
    if RULES.get(kind.name) is not kind:
        raise ValueError(
            f"the sparse rule {kind.__name__} has no name of its own, by which a saved model keeps it; decorate the "
            "class with @sparse_rule('a_name')"
        )
    if torch.compiler.is_compiling():
        # The compiler of torch 2.11 cannot follow `hash`. A rule without one fails later in the
        # call, in a set.
        return
    try:
        hash(rule)
    except TypeError as error:
        raise ValueError(
            f"the sparse rule {kind.__name__} cannot be hashed ({error}); make it a @dataclass(frozen=True), with "
            "tuples in place of lists"
        ) from error


def sparse_rule(name: str) -> Callable[[RuleClass], RuleClass]:
    """Return a class decorator that registers a rule under a name.

    Configs with a registered rule can be saved and loaded.

    Args:
        name: Name of the rule in JSON.

    Raises:
        ValueError: On use of the decorator, if the name is taken.
    """

    def register_rule(cls: RuleClass) -> RuleClass:
        # A module of `mask_rules` registers its rule when it is imported. Other modules must not
        # take that name.
        is_own = name in MASK_RULES and cls.__module__.startswith(f"{__package__}.mask_rules.")
        if name in RULES or (name in MASK_RULES and not is_own):
            raise ValueError(f"sparse rule {name!r} is registered already; choose another name")
        cls.name = name
        RULES[name] = cls
        return cls

    return register_rule


@sparse_rule("exact")
@dataclass(frozen=True)
class Exact(SparseRule):
    """Ordinary attention: every key is seen, in causal calls up to the query's own."""

    @property
    def is_exact(self) -> bool:
        """Always True."""
        return True

    @property
    def only_causal(self) -> str:
        """Always "": the rule does not need causal attention."""
        return ""

    def share(self, length: int) -> float:
        """Return 1.0: every logit is computed."""
        return 1.0

    def share_both_sides(self, length: int) -> float:
        """Return 1.0: every logit is computed."""
        return 1.0

    def visible(self, call: RuleCall) -> Tensor:
        """Return one True for all keys, see `SparseRule.visible`."""
        return torch.ones((), dtype=torch.bool, device=call.key.device)


@sparse_rule("window")
@dataclass(frozen=True)
class Window(SparseRule):
    """Show the nearest tokens and the first ones (StreamingLLM, arXiv 2309.17453).

    Token i sees tokens j with i - near < j <= i, and the sinks, j < sinks. In attention that is not
    causal, the nearest tokens lie on both sides: |i - j| < near.
    """

    near: int = option(256, "tokens at a distance of less than this are seen", least=1)
    sinks: int = option(4, "number of first tokens of the text that are seen", least=0)

    @property
    def only_causal(self) -> str:
        """Always "": the rule does not need causal attention."""
        return ""

    @property
    def reach(self) -> tuple[int, int]:
        """The two fields of the rule: a window sees nothing else, see `Rule.reach`."""
        return self.near, self.sinks

    def share(self, length: int) -> float:
        """Return the share of causal logits: only tokens seen, as nothing is scored."""
        places = torch.arange(length)
        near = places.clamp_max(self.near - 1) + 1
        # Sinks inside the window are counted as near.
        sinks = (places - self.near + 1).clamp(0, self.sinks)
        return share_of(near + sinks)

    def share_both_sides(self, length: int) -> float:
        """Return the share of all logits, with near tokens on both sides."""
        places = torch.arange(length)
        first = (places - self.near + 1).clamp_min(0)
        stop = (places + self.near).clamp_max(length)
        sinks = min(self.sinks, length)
        # Sinks before the near tokens, and sinks after them.
        others = first.clamp_max(sinks) + (sinks - stop).clamp_min(0)
        return share_of(stop - first + others, is_causal=False)

    def visible(self, call: RuleCall) -> Tensor:
        """Return bool [B, 1, N, M], see `SparseRule.visible`."""
        near = call.tokens > call.places - self.near
        if not call.is_causal:
            near = near & (call.tokens < call.places + self.near)
        return near | (call.tokens < self.sinks)


def share_of(counts: Tensor, is_causal: bool = True) -> float:
    """Return the share of logits that are computed, from the number of each query.

    Args:
        counts: [length], the logits of each query. At most as many count as ordinary attention
            computes.
        is_causal: Whether ordinary attention sees no token after a query.
    """
    length = len(counts)
    # float64: the sums over long texts exceed the integers that float32 holds.
    most = torch.arange(1, length + 1, dtype=torch.float64)
    if not is_causal:
        most = torch.full_like(most, length)
    if not length:
        return 1.0
    return float(torch.minimum(counts.double(), most).sum() / most.sum())
