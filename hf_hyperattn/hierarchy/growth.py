"""A hierarchy for a call of other rows and keys than it was made for: beams, several answers, generated tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .ids import extended_ids

if TYPE_CHECKING:
    from typing_extensions import Self


class Growing:
    """What `Hierarchy` does when batch or length change."""

    def fitted(self, batch: int, length: int, growing: bool = True) -> Self:
        """The same for a call of so many rows and keys.

        Rows are repeated one by one where the batch holds several of each (beams, several answers to a prompt). With
        `growing`, new tokens at the end continue the windows, or are siblings of the last token, and slots beyond are
        cut off: a causal host that generates has more keys than the prompt, and in chunks it has less.

        Raises:
            ValueError: the batch is no multiple of the rows, or the length differs where nothing grows.
        """
        if (batch, length) == (self.rows, self.length) or (self.rows == 1 and length == self.length):
            return self
        last = self.__dict__.get("_last_fitted")
        if last is not None and last[0] == (batch, length):
            return last[1]
        if self.rows != 1 and batch % self.rows:
            raise ValueError(
                f"the hierarchy has {self.rows} rows, the batch {batch}; allowed: 1, or a number that divides the "
                "batch"
            )
        if length != self.length and not growing:
            raise ValueError(
                f"the hierarchy covers {self.length} tokens, attention has {length}; allowed: equal numbers, padding "
                "and special tokens included"
            )
        found = self if length == self.length else self.resized(length)
        found = found if found.rows in (1, batch) else found.repeated(batch // found.rows)
        self.__dict__["_last_fitted"] = ((batch, length), found)
        return found

    def repeated(self, times: int) -> Self:
        """Every row so many times in succession."""
        index = [row for row in range(self.rows) for _ in range(times)]
        pick = lambda t: None if t is None else t[index]
        if self.is_windows:
            return replace(self, starts=pick(self.starts), stops=pick(self.stops))
        return replace(
            self, trees=tuple(self.trees[i] for i in index), tokens=tuple(self.tokens[i] for i in index)
        )

    def resized(self, length: int) -> Self:
        """With so many tokens: new ones continue the last windows or groups, missing ones are cut off."""
        if self.is_windows:
            stops = self.stops
            if stops is not None:
                stops = torch.where(stops == self.length, length, stops.clamp(max=length))
            return replace(self, length=length, stops=stops)
        ids = self.to_ids()[:, :length]
        return type(self).from_ids(extended_ids(ids, length - self.length), self.kind_names)
