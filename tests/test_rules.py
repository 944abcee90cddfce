"""`hf_hyperattn.rules`: the rules and the decorator, and rules that are imported when somebody asks for them."""

import json

import pytest

import hf_hyperattn as ha
from hf_hyperattn import rules
from hf_hyperattn.mechanisms import sparse
from tests.forking import run_code

CONFIG = {"mechanism": "sparse", "rules": [{"rule": "vertical_slash", "near": 8, "sinks": 1}]}
IN_A_NEW_PROCESS = f"""
import sys
import hf_hyperattn as ha
assert not any("mask_rules." in name for name in sys.modules)
config = ha.MechanismConfig.from_dict({CONFIG})
from hf_hyperattn.rules import Exact, VerticalSlash
assert type(config.rules[0]) is VerticalSlash and config.rules[0].near == 8
assert not any("mask_rules.clusters" in name for name in sys.modules)
"""


def test_every_name_is_there_and_the_same_as_before():
    for name in rules.__all__:
        assert getattr(rules, name) is getattr(sparse, "sparse_rule" if name == "rule" else name)
    with pytest.raises(AttributeError, match="NoSuchRule"):
        rules.NoSuchRule  # noqa: B018


def test_a_rule_without_a_kernel_is_imported_when_a_config_names_it(tmp_path):
    done = run_code(IN_A_NEW_PROCESS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_its_name_cannot_be_taken():
    with pytest.raises(ValueError, match="'clusters' is registered already"):

        @rules.rule("clusters")
        class Mine(rules.Window):
            """A rule by the name of another."""


def test_an_unknown_rule_is_refused_with_all_names():
    names = ".*".join(["clusters", "exact", "nested_windows", "pages", "vertical_slash", "window"])
    with pytest.raises(ValueError, match=f"'dozens' is unknown; allowed: .*{names}"):
        ha.MechanismConfig.from_dict(
            json.loads(json.dumps(CONFIG | {"rules": [{"rule": "dozens"}]}))
        )
