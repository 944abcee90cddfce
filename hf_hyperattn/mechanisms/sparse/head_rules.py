"""The sparse rules of all query heads, for one or several lengths of text.

`HeadRules` also computes, once, what follows from the rules for every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...engines.selection import computed_once
from .rules import SparseRule, Window

#: A rule for each query head.
Rules = tuple[SparseRule, ...]


@dataclass(frozen=True, eq=False)
class HeadRules:
    """The rules of all query heads, for one or several lengths of text.

    Args:
        by_length: (length, rules), the shortest length first. The rules of a length hold for tokens
            from the previous length on. The last rules hold for all tokens that follow; their
            length may be None.
    """

    # Compared by identity (eq=False): calls of a layer share the object, and caches of results look
    # it up.
    by_length: tuple[tuple[int | None, Rules], ...]

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """The lengths, the shortest first."""
        return tuple(length for length, _ in self.by_length)

    @computed_once
    def every_rule(self) -> Rules:
        """All rules, of every head and length."""
        return tuple(rule for _, heads in self.by_length for rule in heads)

    @computed_once
    def are_exact(self) -> bool:
        """Whether no rule hides anything."""
        return all(rule.is_exact for rule in self.every_rule)

    @computed_once
    def are_local(self) -> bool:
        """Whether no query's keys depend on where its text begins."""
        # Exact type: a subclass of Window may select otherwise. Sinks count from the beginning of
        # the text.
        return all(
            rule.is_exact or (type(rule) is Window and not rule.sinks) for rule in self.every_rule
        )

    @computed_once
    def depend_on_calls(self) -> bool:
        """Whether a rule selects by all queries of a chunk that are in one call."""
        return any(getattr(rule, "query", None) == "chunk" for rule in self.every_rule)

    @computed_once
    def earlier(self) -> int:
        """Largest number of earlier queries that a rule reads, see `Rule.earlier`."""
        return max(rule.earlier for rule in self.every_rule)

    def select_rules(self, heads: list[int]) -> HeadRules:
        """Return the rules of these heads, in this order."""
        return HeadRules(
            tuple((length, tuple(rules[h] for h in heads)) for length, rules in self.by_length)
        )

    def shorten_lengths(self, count: int) -> HeadRules:
        """Return the rules for a text without `count` of its early tokens."""
        if not count or self.lengths == (None,):
            return self
        return HeadRules(
            tuple((n if n is None else n - count, rules) for n, rules in self.by_length)
        )

    def check_both_sides(self, where: str) -> None:
        """Raise if a rule needs causal attention; for layers that are not causal.

        Args:
            where: Name of the attention layer, for the error.

        Raises:
            ValueError: A rule is defined for causal attention only, or rules change with the
                length.
        """
        lengths = tuple(length for length in self.lengths if length is not None)
        found = [rule.only_causal for rule in self.every_rule if rule.only_causal]
        if not lengths and not found:
            return
        given = found[0] if found else f"SparseConfig(lengths={lengths})"
        raise ValueError(
            f"sparse was given {given} for {where}, whose queries see the tokens after them too; allowed there: "
            "Exact(), Window(), Pages() with query='own', 'first' or 'chunk', rules of your own with only_causal='', "
            "all without lengths; causal layers are chosen by layers=lambda host: host.is_causal"
        )
