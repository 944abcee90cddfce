"""The base of all checks: a check holds, or it is refused with an expected error.

Here you learn how the checks of mechanisms and engines report failures and refusals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

import torch


class ContractError(AssertionError):
    """A broken contract, described in one line."""


class Refused(Exception):
    """A mechanism or an engine refuses a setting, with a reason in one line."""


@dataclass(frozen=True)
class Expectation:
    """A check that must hold, or must be refused. Call the object to run it.

    Args:
        refusal: Regular expression that the refusal must contain. None: the check must hold.

    Raises:
        ContractError: The check fails, or it is refused unexpectedly, or an expected refusal is
            missing.
    """

    refusal: str | None = field(default=None, kw_only=True)

    def __call__(self) -> None:
        # Every check draws the same random numbers, whatever ran before.
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
        """Run the check; raise ContractError or Refused."""
        raise NotImplementedError

    def fail(self, what: str, found: object = "") -> NoReturn:
        """Raise a ContractError that begins with the check's name."""
        detail = f": {found}" if found != "" else ""
        raise ContractError(f"{self}: {what}{detail}")


AnyExpectation = TypeVar("AnyExpectation", bound=Expectation)


def expect_refusals(
    checks: list[AnyExpectation], refuses: Mapping[str, str] | None
) -> list[AnyExpectation]:
    """Set the expected refusals of checks, in place.

    Args:
        checks: The checks.
        refuses: Expected refusals: from regular expressions for whole names of checks to regular
            expressions for errors.

    Returns:
        The same list.

    Raises:
        ValueError: No check has a name that matches.
    """
    for pattern, refusal in (refuses or {}).items():
        chosen = [i for i, check in enumerate(checks) if re.fullmatch(pattern, str(check))]
        if not chosen:
            raise ValueError(
                f"refuses has {pattern!r}, and no check has such a name; allowed: such as {checks[0]}"
            )
        for i in chosen:
            checks[i] = replace(checks[i], refusal=refusal)
    return checks


def run_checks(name: str, checks: Iterable[Expectation]) -> dict[str, int]:
    """Run all checks; return how many held ("held") and were refused ("refused").

    Raises:
        ContractError: A check failed.
        ValueError: No check held.
    """
    counts = {"held": 0, "refused": 0}
    for check in checks:
        check()
        counts["held" if check.refusal is None else "refused"] += 1
    # A mechanism that is refused everywhere would pass without a single check.
    if not counts["held"]:
        raise ValueError(
            f"{name} is refused in all {counts['refused']} checks; allowed: one that holds at least"
        )
    return counts
