"""A road: a function that takes a case on a way of the ecosystem and yields pairs of what came out and what should."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.oracles.marks import has_native_adapters

from .cases import Case


@dataclass(frozen=True)
class Road:
    """One road.

    Args:
        name: as in the table.
        group: heading of the table that it stands in.
        function: `function(case, folder)` yields pairs (got, wanted) of tensors or bools; the folder is its own.
        fast: whether it is part of `make test`.
        needs: modules of third parties.
        applies: which cases it is open to; all where None.
        control: whether the stock model takes it too; False where a stock model has nothing to lose on it.
        tolerance: of logits, as a share of the largest where that is above 1.
        ranks: how many processes take it together.
        native_adapters: whether it needs Transformers' own adapters, `model.add_adapter`.
    """

    name: str
    group: str
    function: Callable
    fast: bool = False
    needs: tuple[str, ...] = ()
    applies: Callable[[Case], bool] | None = None
    control: bool = True
    tolerance: float = 1e-5
    ranks: int = 1
    native_adapters: bool = False

    def missing(self) -> str | None:
        """The first module that is not installed, or a PEFT that Transformers takes for its native adapters."""
        if self.native_adapters and not has_native_adapters():
            return f"PEFT {MIN_PEFT_VERSION}"
        return next((m for m in self.needs if importlib.util.find_spec(m) is None), None)

    def open_to(self, case: Case) -> bool:
        return self.applies is None or self.applies(case)


#: Headings in their order, which is also that of the runs: what takes longest comes last.
GROUPS = ("Files", "In memory", "Situations", "PEFT", "Programs", "Processes")
ROADS: dict[str, Road] = {}


def road(name: str, group: str, **options):
    """Register a function as a road."""

    def register(function):
        assert name not in ROADS, name
        ROADS[name] = Road(name, group, function, **options)
        return function

    return register
