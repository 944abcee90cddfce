"""The public face: every mechanism of ours stands in it by an explicit import, and misspelt names are answered."""

import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import hf_hyperattn as ha
from hf_hyperattn import functional, mechanisms
from hf_hyperattn.config import MODES, HyperAttnConfig
from hf_hyperattn.registry import MECHANISMS

#: `selection` is no mechanism: what mechanisms that select keys have in common.
ROOMS = [
    room.name
    for room in pkgutil.iter_modules(mechanisms.__path__)
    if room.ispkg and room.name != "selection"
]
SCRIPT = Path(__file__).parent / "typing_script.py"


def literals(hint) -> set:
    """The values of the Literals in a type."""
    values = set(get_args(hint)) if get_origin(hint) is Literal else set()
    return values.union(*map(literals, get_args(hint))) if not values else values


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_ours_stands_in_the_face(room):
    mechanism = MECHANISMS[room]
    name = mechanism.config.__name__
    assert vars(ha)[name] is mechanism.config and name in ha.__all__
    for name, function in mechanism.functions.items():
        assert vars(functional)[name] is function and name in functional.__all__


def test_the_face_has_nothing_else():
    ours = [MECHANISMS[room] for room in ROOMS]
    names = {"edge_attention", "scored_attention", *(name for m in ours for name in m.functions)}
    assert set(functional.__all__) == names and len(functional.__all__) == len(names)
    configs = {
        name
        for name, part in vars(ha).items()
        if inspect.isclass(part) and hasattr(part, "mechanism")
    }
    assert configs == {m.config.__name__ for m in ours} | {"MechanismConfig", "ScoreConfig"}
    assert all(hasattr(ha, name) for name in ha.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_type_checkers_know_the_choices_of_a_field(room):
    config = MECHANISMS[room].config
    hints = get_type_hints(config)
    for field in fields(config):
        if field.metadata["choices"]:
            assert literals(hints[field.name]) == set(field.metadata["choices"])


def test_type_checkers_know_the_modes():
    assert literals(get_type_hints(HyperAttnConfig)["mode"]) == set(MODES)
    assert literals(
        inspect.signature(ha.patch_model, eval_str=True).parameters["mode"].annotation
    ) == set(MODES)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: ha.ConeConfig(gama=1),
            "ConeConfig has no field 'gama'; allowed: variant, mapping, gamma, .*; did you mean 'gamma'?",
        ),
        (
            lambda: ha.ConeConfig(gamma=1, zzz=2),
            "ConeConfig has no field 'zzz'; allowed: variant, .*, clamp_heights",
        ),
        (
            lambda: ha.HyperAttnConfig(mechanism=[]),
            "HyperAttnConfig has no field 'mechanism'; .*; did you mean 'mechanisms'?",
        ),
    ],
)
def test_a_wrong_keyword(make, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message).replace(re.escape('.*'), '.*')}$"):
        make()


@pytest.mark.parametrize("module, near", [(ha, "patch_model"), (functional, "cone_attention")])
def test_a_misspelt_name(module, near):
    with pytest.raises(
        AttributeError, match=f"^{module.__name__} has no '{near}s'; it has: .*{near}, "
    ):
        getattr(module, near + "s")


CHECKERS = {
    "mypy": ["mypy", "--no-incremental"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


def checked(checker: str, *more: str) -> subprocess.CompletedProcess:
    """A type checker's process, run with the settings in pyproject.toml."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed (pip install -e '.[typing]')")
    command = [sys.executable, "-m", *CHECKERS[checker], *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_packages_pass_a_type_checker_and_a_users_script_where_it_is_right(checker):
    """One run for both, since either reads all of the package."""
    done = checked(checker, "hf_hyperattn", "model_patches", "hub_cards", str(SCRIPT))
    errors = [line for line in done.stdout.splitlines() if re.search(r":\d+:.* error:? ", line)]
    assert not [line for line in errors if SCRIPT.name not in line], done.stdout
    flagged = {int(re.search(rf"{SCRIPT.name}:(\d+):", line)[1]) for line in errors}
    marked = {
        i for i, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith("# error")
    }
    assert flagged == marked, done.stdout + done.stderr
