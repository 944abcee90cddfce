"""Measured numbers on a card: each one with the command, the machine and the versions that produced it.

They go into the card's table, into ``model-index`` (huggingface_hub's legacy ``EvalResult``) and, where the
number belongs to a benchmark data set on the Hub, into ``.eval_results/*.yaml`` (``EvalResultEntry``).
"""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from .spec import refuse

HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_hub_id(name: object) -> bool:
    """Whether ``name`` has the form of a repository id on the Hub (``name`` or ``owner/name``)."""
    return (
        isinstance(name, str)
        and HUB_ID.fullmatch(name) is not None
        and ".." not in name
        and "--" not in name
    )


def is_date(value: object) -> bool:
    """Whether ``value`` starts with an ISO date."""
    try:
        return bool(datetime.date.fromisoformat(str(value)[:10]))
    except ValueError:
        return False


@dataclass(frozen=True)
class Result:
    """One measured number.

    Args:
        metric: name of the metric, such as ``perplexity``.
        value: the number, finite.
        dataset: name of the data, such as ``Python 3.11 licence text``.
        command: the command that printed the number.
        machine: what it ran on, such as ``2 cores of an x86-64 server``.
        versions: package name to version.
        base_value: the same number of the base model, where it was measured in the same way.
        task: task name of the Hub. Default ``text-generation``.
        dataset_id, task_id: the data set and the benchmark task on the Hub; both needed for
            ``.eval_results``.
        split, revision: part and commit of the data set.
        date: ISO date of the measurement. source_url: where the log is. notes: one sentence about the setup.
    """

    metric: str
    value: float
    dataset: str
    command: str
    machine: str
    versions: Mapping[str, str]
    base_value: float | None = None
    task: str = "text-generation"
    dataset_id: str | None = None
    task_id: str | None = None
    split: str | None = None
    revision: str | None = None
    date: str | None = None
    source_url: str | None = None
    notes: str | None = None

    def __post_init__(self):
        for name in ("metric", "dataset", "command", "machine"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise refuse(f"result.{name}", getattr(self, name), "a string that is not empty")
        for name in ("value", "base_value"):
            number = getattr(self, name)
            missing = number is None and name == "base_value"
            if not missing and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise refuse(f"result.{name}", number, "a number")
            if number is not None and not math.isfinite(number):
                raise refuse(f"result.{name}", number, "a finite number")
        if not isinstance(self.versions, Mapping) or not self.versions:
            raise refuse(
                "result.versions", self.versions, "package names with their versions, at least one"
            )
        if self.dataset_id is not None and not is_hub_id(self.dataset_id):
            raise refuse(
                "result.dataset_id", self.dataset_id, "a data set id on the Hub, 'owner/name'"
            )
        if self.date is not None and not is_date(self.date):
            raise refuse("result.date", self.date, "an ISO date such as 2026-11-21")


def read_results(results: Sequence | None) -> tuple[Result, ...]:
    """Results given as ``Result`` or plain dicts (from JSON); ValueError names what is missing or unknown."""
    known = {field.name for field in fields(Result)}
    made = []
    for result in results or ():
        if isinstance(result, Result):
            made.append(result)
            continue
        if not isinstance(result, Mapping) or set(result) - known:
            raise refuse("a result", result, f"an object with {', '.join(sorted(known))}")
        try:
            made.append(Result(**result))
        except TypeError:
            missing = [
                name
                for name in ("metric", "value", "dataset", "command", "machine", "versions")
                if name not in result
            ]
            raise refuse("a result", result, f"one that also has {', '.join(missing)}") from None
    return tuple(made)


def eval_results(results: Sequence[Result]) -> list:
    """The numbers as ``huggingface_hub.EvalResult``; data not on the Hub get a type made of their name."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type=r.task,
            dataset_type=r.dataset_id or re.sub(r"\W+", "-", r.dataset.lower()).strip("-"),
            dataset_name=r.dataset,
            dataset_split=r.split,
            dataset_revision=r.revision,
            metric_type=r.metric,
            metric_value=r.value,
            metric_name=r.metric,
            source_url=r.source_url,
        )
        for r in results
    ]


def eval_entries(results: Sequence[Result]) -> list:
    """The numbers that belong to a benchmark on the Hub, as ``huggingface_hub.EvalResultEntry``."""
    from huggingface_hub import EvalResultEntry

    return [
        EvalResultEntry(
            dataset_id=r.dataset_id,
            task_id=r.task_id,
            value=r.value,
            dataset_revision=r.revision,
            date=r.date,
            source_url=r.source_url,
            notes=r.notes,
        )
        for r in results
        if r.dataset_id and r.task_id
    ]
