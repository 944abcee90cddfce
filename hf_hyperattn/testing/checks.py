"""What is checked, and what has to be refused, for mechanisms and for engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

import torch


class ContractError(AssertionError):
    """A contract that is not kept; one line."""


class Refused(Exception):
    """A mechanism or an engine refuses what it is asked for, in one line."""


@dataclass(frozen=True)
class Expectation:
    """What has to hold, or to be refused: with a line in which the regular expression `refusal` is found."""

    refusal: str | None = field(default=None, kw_only=True)

    def __call__(self) -> None:
        torch.manual_seed(0)
        try:
            self.check()
        except Refused as error:
            if "\n" in str(error):
                self.fail("a refusal has more than one line", error)
            if self.refusal is None:
                self.fail("it is refused, which `refuses` does not expect", error)
            if not re.search(self.refusal, str(error)):
                self.fail(f"the refusal does not say {self.refusal!r}", error)
        else:
            if self.refusal is not None:
                self.fail(f"it is not refused, which `refuses` expects: {self.refusal!r}")

    def check(self) -> None:
        """Raise ContractError, or Refused."""
        raise NotImplementedError

    def fail(self, what: str, found: object = "") -> NoReturn:
        """Raise a ContractError that begins with this check's name."""
        raise ContractError(f"{self}: {what}{f': {found}' if found != '' else ''}")


AnyExpectation = TypeVar("AnyExpectation", bound=Expectation)


def with_refusals(
    checks: list[AnyExpectation], refuses: Mapping[str, str] | None
) -> list[AnyExpectation]:
    """The checks, those with a name in `refuses` with what their refusal says; a pattern without one is an error."""
    for pattern, refusal in (refuses or {}).items():
        chosen = [i for i, check in enumerate(checks) if re.fullmatch(pattern, str(check))]
        if not chosen:
            raise ValueError(
                f"refuses has {pattern!r}, and no check has such a name; allowed: such as {checks[0]}"
            )
        for i in chosen:
            checks[i] = replace(checks[i], refusal=refusal)
    return checks


def run_all(name: str, checks: Iterable[Expectation]) -> dict[str, int]:
    """Call every check; returns how many held and how many were refused as expected."""
    counts = {"held": 0, "refused": 0}
    for check in checks:
        check()
        counts["held" if check.refusal is None else "refused"] += 1
    if not counts["held"]:
        raise ValueError(
            f"{name} is refused in all {counts['refused']} checks; allowed: one that holds at least"
        )
    return counts
