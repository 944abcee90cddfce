"""Configuration of sparse attention: a rule for each query head, for one or several lengths of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...config import MechanismConfig, option
from ...fields import MOST_INTEGER
from .head_rules import HeadRules, Rules
from .pages import Pages
from .rules import SparseRule, check_rule


def default_rules() -> Rules:
    """Return the rules of a config that names none.

    A function makes them: the compiler of torch 2.11 cannot follow a dataclass whose default is an object.
    """
    return (Pages(),)


@dataclass(frozen=True)
class SparseConfig(MechanismConfig):
    """Sparse attention: every query head sees the keys that its rule selects, and a softmax over these alone.

    Nothing is learned beside the gate of mode="blend"; mode="replace" is the rules themselves.
    """

    mechanism = "sparse"

    rules: Any = option(
        default_rules,
        "a rule for all heads, or one for each query head; with lengths, a list of such for each length",
        types=(tuple, list, SparseRule),
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "rising: the rules of a length hold for the tokens of a text from the length before on, the last ones for all "
        "that follow; None: one for all",
        types=(tuple,),
        optional=True,
    )
    tuned_length: int | None = option(
        None,
        "tokens a row that the rules were chosen for; a model that runs on 1.1 times as many warns once; None: the "
        "last of lengths, where there are some",
        types=(int,),
        least=1,
    )

    @property
    def needs(self) -> dict[str, str]:
        """Rules say which pairs of a head count."""
        return {
            "pairwise_logits": "rules select keys, and the logits are of three tokens",
            "logits_by_head": "every head computes the logits of other keys, which then cannot be mixed",
            "keys_as_they_are": "rules select by the keys of every head as the host has them",
        }

    def __post_init__(self):
        if isinstance(self.lengths, list):
            object.__setattr__(self, "lengths", tuple(self.lengths))
        super().__post_init__()
        if self.lengths is None:
            object.__setattr__(self, "rules", self._read(self.rules))
            return
        lengths, rules = self.lengths, self.rules
        counts = all(type(x) is int and 0 < x <= MOST_INTEGER for x in lengths)
        rising = counts and all(a < b for a, b in zip(lengths, lengths[1:]))
        if not lengths or not rising:
            self._refuse("lengths", f"rising numbers of tokens, from 1 to {MOST_INTEGER:,}")
        if not isinstance(rules, list | tuple) or len(rules) != len(lengths):
            self._refuse("rules", f"rules for each of the {len(lengths)} lengths")
        object.__setattr__(self, "rules", tuple(map(self._read, rules)))
        if self.tuned_length is None:
            object.__setattr__(self, "tuned_length", lengths[-1])

    def _read(self, rules: Any) -> Rules:
        rules = rules if isinstance(rules, list | tuple) else (rules,)
        read = tuple(
            SparseRule.from_dict(rule) if isinstance(rule, dict) else rule for rule in rules
        )
        if not read or not all(isinstance(rule, SparseRule) for rule in read):
            self._refuse(
                "rules",
                "sparse rules such as Window(), one for all heads or one for each query head",
            )
        for rule in read:
            check_rule(rule)
        return read

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        write = lambda rules: [rule.to_dict() for rule in rules]
        rules = (
            write(self.rules) if self.lengths is None else [write(heads) for heads in self.rules]
        )
        return {**super().to_dict(), "rules": rules}

    def head_rules(self, heads: int, where: str) -> HeadRules:
        """The rules of all heads, for each length.

        Raises:
            ValueError: rules for another count of heads.
        """
        several = (self.rules,) if self.lengths is None else self.rules
        for rules in several:
            if len(rules) not in (1, heads):
                raise ValueError(
                    f"SparseConfig.rules has {len(rules)} rules; allowed: one, or one for each of the {heads} query "
                    f"heads of {where}"
                )
        lengths = self.lengths or (None,)
        parts = zip(lengths, several, strict=True)
        return HeadRules(tuple((length, rules * (heads // len(rules))) for length, rules in parts))
