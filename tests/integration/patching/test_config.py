"""Configurations: what they hold, their way through JSON and the disk, and what they refuse."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_hyperattn as ha
from hf_hyperattn.config import CONFIG_NAME, FORMAT
from hf_hyperattn.config.configs import write_atomically
from hf_hyperattn.registry import MECHANISMS, STAGES

CONE = ha.ConeConfig()

positive = st.floats(min_value=1e-6, max_value=1e6)
cones = st.builds(
    ha.ConeConfig,
    variant=st.just("umbral"),
    mapping=st.sampled_from([None, "xi", "psi", "expmap"]),
    gamma=positive,
    radius=positive,
) | st.builds(
    ha.ConeConfig,
    variant=st.just("penumbral"),
    mapping=st.sampled_from([None, "psi"]),
    gamma=positive,
    radius=positive,
    squared=st.booleans(),
    clamp_heights=st.booleans(),
)
choices = st.one_of(
    st.none(),
    st.lists(st.integers(-40, 40), min_size=1, max_size=6),
    st.sampled_from(["all", "first-half", "last-third", "last-4", "every-2nd", "every-3rd"]),
)
configs = st.builds(
    ha.HyperAttnConfig,
    mechanisms=cones.map(lambda cone: [cone]),
    layers=choices,
    heads=choices,
    mode=st.sampled_from(["blend", "replace"]),
    include_cross_attention=st.booleans(),
    hosts=st.none()
    | st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5, unique=True),
)


@given(configs)
def test_through_json_and_back(config):
    data = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    again = ha.HyperAttnConfig.from_dict(data)
    assert again.to_dict() == config.to_dict()
    if config.hosts is None:
        assert again == config
    else:  # the hosts say which layers
        assert again == dataclasses.replace(config, layers=None)


@given(cones)
def test_a_mechanism_through_json_and_back(cone):
    assert ha.MechanismConfig.from_dict(json.loads(json.dumps(cone.to_dict()))) == cone


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_has_a_config_that_explains_itself(name):
    config = MECHANISMS[name].config
    assert config.mechanism == name and MECHANISMS[name].stage in STAGES
    assert config.__doc__
    assert any(
        source in MECHANISMS[name].paper for source in ("arXiv", "JMLR", "no paper of its own")
    )
    for field in dataclasses.fields(config):
        assert field.metadata.get("help"), f"{name}.{field.name} has no help"
    if all(f.default is not dataclasses.MISSING for f in dataclasses.fields(config)):
        assert ha.MechanismConfig.from_dict(config().to_dict()) == config()
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().mechanism = "other"


def test_ranges_and_sets_become_numbers():
    config = ha.HyperAttnConfig([CONE], layers=range(2, 4), heads=range(3))
    assert (config.layers, config.heads) == ((2, 3), (0, 1, 2))
    assert config.to_dict()["layers"] == [2, 3]


@pytest.mark.parametrize("name", ["layers", "heads"])
def test_a_function_cannot_be_written_down(name):
    with pytest.raises(ValueError, match=f"{name} is a function, which JSON cannot hold"):
        ha.HyperAttnConfig([CONE], **{name: lambda x: True}).to_dict()


FIELDS = {
    "variant": (["cone", None, 1], "'umbral', 'penumbral'|not None"),
    "mapping": (["phi", 1], "'xi', 'psi', 'expmap'"),
    "gamma": (
        [0, -1, float("nan"), float("inf"), "1", None, True, 1e300],
        "numbers above 0|finite|float|not None",
    ),
    "radius": ([0.0, -0.5, [1.0]], "numbers above 0|float"),
    "squared": ([1, "yes", None], "bool|not None"),
    "clamp_heights": ([0, "no"], "bool"),
}


@pytest.mark.parametrize(
    "field, value", [(f, v) for f, (values, _) in FIELDS.items() for v in values]
)
def test_a_value_out_of_range_names_field_value_and_range(field, value):
    with pytest.raises(
        ValueError, match=rf"ConeConfig\.{field}=.* is not allowed; allowed: .*({FIELDS[field][1]})"
    ):
        ha.ConeConfig(**{field: value})


def test_a_combination_without_meaning_is_refused():
    with pytest.raises(ValueError, match="allowed: mapping='psi', or clamp_heights=True"):
        ha.ConeConfig(variant="penumbral", mapping="xi")
    for setting in ({"squared": False}, {"clamp_heights": True}):
        with pytest.raises(
            ValueError,
            match=r"ConeConfig\.\w+=\w+ has no meaning for variant='umbral'; allowed: leave",
        ):
            ha.ConeConfig(**setting)
        assert ha.ConeConfig(variant="penumbral", **setting)


def test_two_mechanisms_of_one_stage_are_refused():
    with pytest.raises(
        ValueError, match="cone and cone both change the score of attention; .* leave one out"
    ):
        ha.HyperAttnConfig([CONE, ha.ConeConfig(gamma=2.0)])


def test_newer_formats_are_refused_with_advice():
    data = ha.HyperAttnConfig([CONE]).to_dict() | {"format": FORMAT + 1}
    with pytest.raises(
        ValueError,
        match=f"format {FORMAT + 1}, .* reads 1 to {FORMAT}; install a newer one: pip install",
    ):
        ha.HyperAttnConfig.from_dict(data)


def test_unknown_keys_are_refused_with_advice():
    data = ha.HyperAttnConfig([CONE]).to_dict()
    with pytest.raises(ValueError, match="unknown key 'colour'; allowed: heads, hosts, "):
        ha.HyperAttnConfig.from_dict(data | {"colour": "red"})
    data["mechanisms"][0]["height"] = "pair_norm"
    with pytest.raises(
        ValueError, match="ConeConfig has no field 'height'; .*may know it: pip install"
    ):
        ha.HyperAttnConfig.from_dict(data)


# on the disk


@pytest.mark.parametrize("heads", [None, [0, 2], "first-half"])
def test_save_and_load(heads, tmp_path):
    config = ha.HyperAttnConfig(
        [ha.ConeConfig(gamma=0.4)], layers="last-third", heads=heads, mode="replace"
    )
    config.save_pretrained(tmp_path / "new" / "folder")
    assert ha.HyperAttnConfig.from_pretrained(tmp_path / "new" / "folder") == config
    assert ha.HyperAttnConfig.from_pretrained(tmp_path / "new" / "folder" / CONFIG_NAME) == config
    config.save_pretrained(tmp_path / "new" / "folder")
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == [CONFIG_NAME]


def test_arguments_of_saving_and_loading_are_used_or_refused(tmp_path, monkeypatch):
    config, place = ha.HyperAttnConfig([CONE]), tmp_path / "new"
    for unknown, nearest in (("typo", ""), ("push_to_hubb", "; did you mean 'push_to_hub'?")):
        with pytest.raises(
            TypeError, match=f"save_pretrained has no argument '{unknown}'; allowed: push_.*"
        ) as error:
            config.save_pretrained(place, **{unknown: True})
        assert str(error.value).endswith(nearest)
    with pytest.raises(ValueError, match="^repo_id is for push_to_hub=True; leave it out$"):
        config.save_pretrained(place, repo_id="me/mine")
    assert not place.exists()
    pushed = []
    monkeypatch.setattr(
        ha.HyperAttnConfig, "push_to_hub", lambda self, *a, **k: pushed.append((a, k))
    )
    config.save_pretrained(place, push_to_hub=True, repo_id="me/mine", private=True)
    config.save_pretrained(place, max_shard_size="1GB")  # as Transformers' push_to_hub calls it
    assert pushed == [(("me/mine",), {"private": True})]
    with pytest.raises(
        TypeError, match="from_pretrained has no argument 'revison'; .*did you mean 'revision'"
    ):
        ha.HyperAttnConfig.from_pretrained(place, revison="main")
    with pytest.raises(
        ValueError, match="revision is for a Hub id, and .* is on the disk; leave it out"
    ):
        ha.HyperAttnConfig.from_pretrained(place, revision="main")
    assert ha.HyperAttnConfig.from_pretrained(place, revision=None, token="secret") == config


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match="interrupted"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"cannot read .*{CONFIG_NAME}.*allowed: a JSON object"):
        ha.HyperAttnConfig.from_pretrained(tmp_path)


def test_a_config_patches_and_a_patched_model_gives_its_config_back():
    from tests.integration.models import llama

    config = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.4)], layers=[-1], heads=[1], mode="replace")
    model = ha.patch_model(llama(), config)
    found = ha.HyperAttnConfig.from_dict(model.config.hyperattn)
    assert found == dataclasses.replace(config, layers=None, hosts=("model.layers.3.self_attn",))
    twin = ha.patch_model(llama(), found)
    assert ha.describe(twin)["hosts"] == ha.describe(model)["hosts"]
