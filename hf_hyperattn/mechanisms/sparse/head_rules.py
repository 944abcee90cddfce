"""The rules of all query heads of a call, and what follows from them whatever the call."""

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
        by_length: (length, rules), the shortest length first. The rules of a length hold for the tokens from the length
            before on. Those of the last one hold for all that follow; its length may be None.
    """

    by_length: tuple[tuple[int | None, Rules], ...]

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """The lengths, the shortest first."""
        return tuple(length for length, _ in self.by_length)

    @computed_once
    def every(self) -> Rules:
        """All rules, of every head and length."""
        return tuple(rule for _, heads in self.by_length for rule in heads)

    @computed_once
    def are_exact(self) -> bool:
        """Whether nothing is hidden."""
        return all(rule.is_exact for rule in self.every)

    @computed_once
    def are_local(self) -> bool:
        """Whether no query's keys depend on where its text begins."""
        return all(
            rule.is_exact or (type(rule) is Window and not rule.sinks) for rule in self.every
        )

    @computed_once
    def earlier(self) -> int:
        """How many queries before a query the rules read at most, see `Rule.earlier`."""
        return max(rule.earlier for rule in self.every)

    def of_heads(self, heads: list[int]) -> HeadRules:
        """Return the rules of these heads, in this order."""
        return HeadRules(
            tuple((length, tuple(rules[h] for h in heads)) for length, rules in self.by_length)
        )

    def after_tokens(self, count: int) -> HeadRules:
        """Return the rules of what is left of a text without `count` of its tokens: lengths end earlier there."""
        if not count or self.lengths == (None,):
            return self
        return HeadRules(
            tuple((n if n is None else n - count, rules) for n, rules in self.by_length)
        )

    def check_both_sides(self, where: str) -> None:
        """Refuse rules that have no meaning where queries see the tokens after them too.

        Args:
            where: The attention layer, for the error.

        Raises:
            ValueError: A rule is defined for causal attention only, or rules change with the length.
        """
        lengths = tuple(length for length in self.lengths if length is not None)
        found = [rule.only_causal for rule in self.every if rule.only_causal]
        if not lengths and not found:
            return
        given = found[0] if found else f"SparseConfig(lengths={lengths})"
        raise ValueError(
            f"sparse was given {given} for {where}, whose queries see the tokens after them too; allowed there: "
            "Exact(), Window(), Pages() with query='own', 'first' or 'chunk', rules of your own with only_causal='', "
            "all without lengths; causal layers are chosen by layers=lambda host: host.is_causal"
        )
