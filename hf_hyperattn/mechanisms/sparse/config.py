"""`SparseConfig`: the sparse rule of each query head.

It checks the rules and writes them to JSON. `HeadRules` (head_rules.py) is what a call reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...config import MechanismConfig, option
from ...config.fields import MOST_INTEGER
from .head_rules import HeadRules, Rules
from .pages import Pages
from .rules import SparseRule, check_rule


def default_rules() -> Rules:
    """Return the rules of a config that names none."""
    # A function, because the compiler of torch 2.11 cannot follow a dataclass whose default is an
    # object.
    return (Pages(),)


@dataclass(frozen=True)
class SparseConfig(MechanismConfig):
    """Sparse attention: each query head only attends to keys that its rule selects.

    mode="replace" applies the rules. mode="blend" mixes the result with full attention by a gate,
    the only learned parameter.
    """

    mechanism = "sparse"

    rules: Any = option(
        default_rules,
        "a rule for all heads, or one for each query head; with lengths, such a list for each length",
        types=(tuple, list, SparseRule),
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "rising: the rules of a length hold for tokens from the previous length on, the last rules for all that "
        "follow; None: the same rules for all lengths",
        types=(tuple,),
        optional=True,
    )
    tuned_length: int | None = option(
        None,
        "tokens per row that the rules were chosen for; a model that runs on more than 1.1 times as many warns once; "
        "None: the last of lengths, if there are any",
        types=(int,),
        least=1,
    )

    @property
    def needs(self) -> dict[str, str]:
        """Properties that other mechanisms must not remove, each with the reason."""
        return {
            "pairwise_logits": "rules select keys, and the logits are of three tokens",
            "logits_by_head": "every head computes the logits of other keys, which then cannot be mixed",
            "keys_as_they_are": "rules select by the keys of every head as the host has them",
        }

    @property
    def reads_earlier_queries(self) -> bool:
        """Whether a rule of some head selects by queries of earlier calls."""
        return self.all_rules.earlier > 0

    @property
    def depends_on_calls(self) -> bool:
        """Whether a rule selects by all queries of a chunk that are in one call."""
        return self.all_rules.depend_on_calls

    @property
    def all_rules(self) -> HeadRules:
        """The rules as the config has them: a single rule stands for all heads.

        Without lengths they are the rules of one length, None.
        """
        several = (self.rules,) if self.lengths is None else self.rules
        return HeadRules(tuple(zip(self.lengths or (None,), several, strict=True)))

    def __post_init__(self):
        # The dataclass is frozen, so plain assignments raise.
        if isinstance(self.lengths, list):
            object.__setattr__(self, "lengths", tuple(self.lengths))
        super().__post_init__()
        if self.lengths is None:
            object.__setattr__(self, "rules", self._read_rules(self.rules))
            return
        lengths, rules = self.lengths, self.rules
        # The type is compared, because bool is a subclass of int.
        are_counts = all(type(x) is int and 0 < x <= MOST_INTEGER for x in lengths)
        are_rising = are_counts and all(a < b for a, b in zip(lengths, lengths[1:]))
        if not lengths or not are_rising:
            self._refuse("lengths", f"rising numbers of tokens, from 1 to {MOST_INTEGER:,}")
        if not isinstance(rules, list | tuple) or len(rules) != len(lengths):
            self._refuse("rules", f"rules for each of the {len(lengths)} lengths")
        object.__setattr__(self, "rules", tuple(map(self._read_rules, rules)))
        # Longer texts run on the rules of the last length, which were not measured there.
        if self.tuned_length is None:
            object.__setattr__(self, "tuned_length", lengths[-1])

    def _read_rules(self, rules: Any) -> Rules:
        """Return a rule, or a list of rules or their dicts, as a checked tuple."""
        # JSON has dicts in place of rules.
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
        """Return the config as JSON values."""

        def write_rules(rules: Rules) -> list[dict[str, Any]]:
            return [rule.to_dict() for rule in rules]

        if self.lengths is None:
            rules: list = write_rules(self.rules)
        else:
            rules = [write_rules(heads) for heads in self.rules]
        return {**super().to_dict(), "rules": rules}

    def head_rules(self, heads: int, where: str) -> HeadRules:
        """Return the rules of all heads, for each length.

        Args:
            heads: Number of query heads.
            where: Name of the attention layer, for the error.

        Raises:
            ValueError: The config has rules for another number of heads.
        """
        by_length = self.all_rules.by_length
        for _, rules in by_length:
            if len(rules) not in (1, heads):
                raise ValueError(
                    f"SparseConfig.rules has {len(rules)} rules; allowed: one, or one for each of the {heads} query "
                    f"heads of {where}"
                )
        # A single rule is repeated for every head.
        return HeadRules(
            tuple((length, rules * (heads // len(rules))) for length, rules in by_length)
        )
