"""Methods of Transformers and PEFT that are no longer what our wrappers expect are noticed, in one warning."""

from __future__ import annotations

import importlib.metadata

import pytest

from hf_hyperattn.integration.patching import wrapping
from hf_hyperattn.integration.patching.versions import name_tested
from hf_hyperattn.integration.patching.wrapping import warn_of_changes, wrap


class Theirs:
    def save(self, place, main=True, **options):
        return (place, main, options)

    @classmethod
    def load(cls, place):
        return cls, place

    @staticmethod
    def finish(model, config):
        return model, config


def passing(original, self, place, *args, **kwargs):
    return original(self, place, *args, **kwargs)


def exact(original, self, place):
    return original(self, place)


def renamed(original, self, folder, *args, **kwargs):
    return original(self, folder, *args, **kwargs)


def narrow(original, self):
    return original(self, "nowhere")


@pytest.fixture
def changes(monkeypatch):
    """What this test notes, and nothing that the import noted."""
    found = []
    monkeypatch.setattr(wrapping, "changes", found)
    return found


def test_nothing_has_changed_in_the_versions_that_are_installed():
    assert wrapping.changes == []


@pytest.mark.parametrize(
    "name, wrapper, expected",
    [
        ("save", passing, []),
        ("save", exact, []),
        ("load", exact, []),
        ("save", renamed, ["Theirs.save now takes (place, main, options)"]),
        ("load", narrow, ["Theirs.load now takes (place)"]),
        ("gone", passing, ["Theirs.gone is missing"]),
    ],
)
def test_what_has_changed_is_noted(name, wrapper, expected, changes):
    cls = type("Theirs", (), dict(vars(Theirs)))
    assert wrap(name, cls)(wrapper) is wrapper
    assert changes == expected


def test_one_warning_names_all_and_the_versions(changes, caplog):
    cls = type("Theirs", (), dict(vars(Theirs)))
    wrap("gone", cls)(passing)
    wrap("save", cls)(renamed)
    warn_of_changes()
    (record,) = caplog.records
    text = record.getMessage()
    assert "\n" not in text and "Theirs.gone is missing; Theirs.save now takes" in text
    assert all(importlib.metadata.version(name) in text for name in ("transformers", "peft"))
    assert name_tested("transformers", "peft") in text
    changes.clear()
    warn_of_changes()
    assert len(caplog.records) == 1


def test_methods_of_all_kinds_are_wrapped_once_by_each(changes):
    cls = type("Theirs", (), dict(vars(Theirs)))
    seen = []

    def one(original, self, place, *args, **kwargs):
        seen.append("one")
        return original(self, place, *args, **kwargs)

    def two(original, self, place, *args, **kwargs):
        seen.append("two")
        return original(self, place, *args, **kwargs)

    def static(original, model, config):
        seen.append("static")
        return original(model, config)

    for wrapper in (one, one, two):
        wrap("save", cls)(wrapper)
    wrap("load", cls)(exact)
    wrap("finish", cls)(static)
    assert cls().save("here", main=False) == ("here", False, {}) and seen == ["two", "one"]
    assert cls.load("here") == (cls, "here") and cls.finish(1, 2) == (1, 2) == cls().finish(1, 2)
    assert seen[2:] == ["static", "static"] and changes == []
