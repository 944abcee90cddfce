"""Everything a card may state, checked in one place before any template sees it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .mechanisms import About, lookup
from .results import Result, is_hub_id, read_results
from .spec import Spec, read_spec, refuse

AUTO_CLASS = re.compile(r"AutoModel(For\w{1,60})?", re.ASCII)
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})?|code|multilingual")
SLUG = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,60}")


@dataclass(frozen=True)
class Facts:
    """What is known about one published repository. Everything but ``config`` may be left out.

    Args:
        config: the ``hyperattn`` dict of config.json, or the whole config.json as a dict.
        repo_id: where it is published; the card's title and loading code use it.
        base_model: Hub id of the model that was patched. base_model_relation: ``finetune`` or ``adapter``.
        license: licence identifier of the Hub, such as ``apache-2.0``; license_name, license_link with
            ``other``.
        language: ISO 639 code, or a list of them. datasets: Hub ids of the training data.
        pipeline_tag, auto_class: the task and the Auto class that loads the model.
        results: measured numbers, see ``Result``; plain dicts are taken too.
        parameters_added, parameters_total: counts.
        gates: smallest and largest blend gate, where they were read.
        adapter: the adapter_config.json of a PEFT adapter.
        tokenizer: whether the repository holds a tokenizer.
        about: descriptions of mechanisms made outside this project, by name.
        versions: package name to version, of what wrote the repository. tags: more tags.

    Raises:
        ValueError: a value that has no place in a card; one line with the field, the value and what is
            allowed.
    """

    config: Mapping
    repo_id: str | None = None
    base_model: str | None = None
    base_model_relation: str = "finetune"
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: str | Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    pipeline_tag: str | None = None
    auto_class: str = "AutoModel"
    results: Sequence[Result] = ()
    parameters_added: int | None = None
    parameters_total: int | None = None
    gates: tuple[float, float] | None = None
    adapter: Mapping | None = None
    tokenizer: bool = False
    about: Mapping | None = None
    versions: Mapping[str, str] | None = None
    tags: Sequence[str] = ()
    spec: Spec = field(init=False)
    mechanisms: tuple[tuple[str, str, About], ...] = field(init=False)

    def __post_init__(self):
        self._check_ids()
        self._check_words()
        self._check_numbers()
        spec = read_spec(self.config)
        named = tuple((name, shown, lookup(name, self.about)) for name, shown in spec.mechanisms)
        for key, value in {
            "spec": spec,
            "mechanisms": named,
            "results": read_results(self.results),
        }.items():
            object.__setattr__(self, key, value)

    def _check_ids(self) -> None:
        for name in ("repo_id", "base_model"):
            value = getattr(self, name)
            if value is not None and not is_hub_id(value):
                raise refuse(name, value, "an id on the Hub, 'owner/name', or None")
        for value in self.datasets or ():
            if not is_hub_id(value):
                raise refuse("datasets", value, "ids of data sets on the Hub")

    def _check_words(self) -> None:
        languages = [self.language] if isinstance(self.language, str) else self.language or ()
        words = [("license", self.license, SLUG), ("pipeline_tag", self.pipeline_tag, SLUG)]
        words += [("language", value, LANGUAGE) for value in languages]
        words += [("auto_class", self.auto_class, AUTO_CLASS)]
        for name, value, pattern in words:
            if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
                raise refuse(name, value, f"a string of the form {pattern.pattern}")
        if self.base_model_relation not in ("finetune", "adapter"):
            raise refuse("base_model_relation", self.base_model_relation, "finetune, adapter")
        if self.license == "other" and not (self.license_name and self.license_link):
            raise refuse("license", "other", "other together with license_name and license_link")

    def _check_numbers(self) -> None:
        for name in ("parameters_added", "parameters_total"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise refuse(name, value, "a count from 0, or None")
        if self.gates is not None:
            pair = isinstance(self.gates, Sequence) and len(self.gates) == 2
            if not pair or not all(
                type(gate) in (int, float) and math.isfinite(gate) for gate in self.gates
            ):
                raise refuse("gates", self.gates, "the smallest and the largest gate, or None")
            object.__setattr__(self, "gates", tuple(self.gates))

    @property
    def papers(self) -> list[str]:
        """Every paper of the mechanisms used, once, in order."""
        return list(
            dict.fromkeys(paper for _, _, about in self.mechanisms for paper in about.papers)
        )

    @property
    def limits(self) -> list[str]:
        """Every limit of the mechanisms used, once, in order."""
        return list(
            dict.fromkeys(limit for _, _, about in self.mechanisms for limit in about.limits)
        )
