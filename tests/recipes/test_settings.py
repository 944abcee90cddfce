"""A wrong key, type or value in a recipe is one line that names it, its value and what is allowed."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from finetuning.checkpoints import RECIPE, check_same_recipe
from finetuning.settings import GROUPS, read_settings

import hf_hyperattn as ha
from tests.integration.models import llama

from .tiny import ROOT, recipe, write

RECIPES = sorted(
    p
    for p in (ROOT / "recipes").glob("*/*.yaml")
    if p.with_name("base.yaml").exists() and p.stem != "base"
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("published", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_published_recipes_are_valid_and_come_back_from_their_own_json(published, path):
    settings = read_settings(published)
    assert read_settings(write(path, settings.to_dict())) == settings
    assert settings.to_dict().keys() == GROUPS.keys()


def test_a_run_that_was_begun_with_fewer_settings_goes_on(tmp_path):
    now = read_settings(ROOT / "recipes/smollm2/cone.yaml").to_dict()
    begun = json.loads(json.dumps(now))
    for group, name in (
        ("model", "task"),
        ("model", "config"),
        ("data", "label"),
        ("data", "train_rows"),
    ):
        del begun[group][name]
    (tmp_path / RECIPE).write_text(json.dumps(begun))
    check_same_recipe(tmp_path, now | {"launch": {}})
    now["model"]["task"] = "translation"
    with pytest.raises(ValueError, match="model.task='text-generation', now it is 'translation'"):
        check_same_recipe(tmp_path, now)


@pytest.mark.parametrize(
    "published", [p for p in RECIPES if p.parent.name == "smollm2"], ids=lambda p: p.stem
)
def test_published_recipes_train_the_mechanism(published):
    settings = read_settings(published)
    model, ids = ha.patch_model(llama(), settings.mechanisms.config), torch.arange(5, 25)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(
        p.grad is not None and p.grad.any() for n, p in model.named_parameters() if ".hyper." in n
    )


def test_a_recipe_wins_over_its_base_key_by_key(tmp_path):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "most.yaml", {"trainer": {"steps": 5}, "peft": {"r": 2}})
    write(tmp_path / "base.yaml", {"base": "most.yaml", "trainer": {"steps": 7, "seed": 3}})
    path = write(
        tmp_path / "mine" / "one.yaml",
        {
            "base": "../base.yaml",
            "mechanisms": {"use": [{"mechanism": "cone"}]},
            "trainer": {"seed": 4},
        },
    )
    settings = read_settings(path, ["peft.alpha=3"])
    trainer, peft = settings.trainer, settings.peft
    assert (trainer.steps, trainer.seed, peft.r, peft.alpha, trainer.output) == (
        7,
        4,
        2,
        3,
        "outputs/mine/one",
    )
    write(path, {"base": 3})
    with pytest.raises(
        ValueError, match=r"^base is 3; allowed: the path of a YAML file, from the folder of "
    ):
        read_settings(path)
    write(path, {"base": "none.yaml"})
    with pytest.raises(ValueError, match=r"none.yaml: No such file"):
        read_settings(path)
    write(path, {"base": "one.yaml"})
    with pytest.raises(ValueError, match=r"^base 'one.yaml' is read from itself"):
        read_settings(path)


def test_values_arrive_typed(path):
    changes = {"learning_rate": "RATE", "steps": 7}
    text = yaml.safe_dump(recipe("m", "o", trainer=changes)).replace("RATE", "3e-4")
    path.write_text(text)
    settings = read_settings(path)
    assert (settings.trainer.learning_rate, settings.trainer.steps) == (3e-4, 7)
    assert settings.mechanisms.config == ha.HyperAttnConfig([ha.ConeConfig()], layers="last-2")


def test_changes_win_over_the_file(path):
    write(path, recipe("m", "o"))
    changes = [
        "trainer.steps=3",
        "data.name=other.txt",
        "hub.license=mit",
        "mechanisms.layers=[0, 1]",
    ]
    settings = read_settings(path, changes)
    assert (settings.trainer.steps, settings.data.name, settings.hub.license) == (
        3,
        "other.txt",
        "mit",
    )
    assert settings.mechanisms.config.layers == (0, 1)


WRONG = {
    "unknown group": (
        {"training": {"steps": 1}},
        r"^the recipe has no key 'training' .*allowed: model, .*hub$",
    ),
    "unknown key": (
        {"trainer": {"step": 1}},
        r"^trainer has no key 'step' \(its value: 1\); allowed: .*steps",
    ),
    "wrong type": (
        {"trainer": {"steps": "many"}},
        r"^trainer.steps='many' is not allowed; allowed: int$",
    ),
    "a bool for a number": (
        {"trainer": {"steps": True}},
        r"^trainer.steps=True is not allowed; allowed: int$",
    ),
    "out of range": (
        {"data": {"length": 2}},
        r"^data.length=2 is not allowed; allowed: numbers from 8$",
    ),
    "not finite": (
        {"trainer": {"learning_rate": float("nan")}},
        r"^trainer.learning_rate=nan is not allowed",
    ),
    "unknown choice": (
        {"peft": {"method": "qlora"}},
        r"^peft.method='qlora' .*'lora', 'added', 'full'$",
    ),
    "none": ({"model": {"name": None}}, r"^model.name=None is not allowed; allowed: a value"),
    "bad mechanism": (
        {"mechanisms": {"use": [{"mechanism": "cone", "gamma": -1}]}},
        r"^mechanisms: ConeConfig.gamma=-1 is not allowed; allowed: numbers above 0$",
    ),
    "unknown mechanism": (
        {"mechanisms": {"use": [{"mechanism": "sphere"}]}},
        r"^mechanisms: mechanism 'sphere'",
    ),
    "no mechanism": ({"mechanisms": {"use": []}}, r"^mechanisms.use is empty; allowed: a list"),
    "layers": ({"mechanisms": {"layers": {"from": 1}}}, r"^mechanisms.layers=.* is not allowed"),
    "nothing to train": ({"peft": {"method": "added", "added": False}}, r"trains nothing"),
    "all of it dropped": (
        {"peft": {"dropout": 1}},
        r"^peft.dropout=1 is not allowed; allowed: numbers from 0, below 1",
    ),
    "text without a name": (
        {"data": {"name": None}},
        r"^data.source='file' with data.name=None; allowed: data.name",
    ),
    "data of another task": (
        {"model": {"task": "translation"}},
        r"^data.source='file' with model.task='translation'; allowed: libreoffice-help, hub$",
    ),
    "unknown task": (
        {"model": {"task": "translate"}},
        r"^model.task='translate' is not allowed; allowed: ",
    ),
    "adapters of random weights": (
        {"model": {"config": {"model_type": "bart"}}},
        r"^model.config with peft.method='lora'",
    ),
    "no tokenizer": (
        {"model": {"config": {"model_type": "llama"}}, "peft": {"method": "full"}},
        r"^model.config with model.task='text-generation': it has no tokenizer; set model.name$",
    ),
    "LoRA's settings without LoRA": (
        {"peft": {"method": "full"}},
        r"^peft.r=4 says nothing with peft.method='full'; leave it out$",
    ),
    "merged without LoRA": (
        {"peft": {"method": "added", "r": 8, "dropout": 0.0}, "trainer": {"merged": True}},
        r"^trainer.merged=True says nothing with peft.method='added'; leave it out$",
    ),
    "a split of a file": (
        {"data": {"split": "test"}},
        r"^data.split='test' says nothing with data.source='file'; leave it out$",
    ),
    "a column of Python's source": (
        {"data": {"source": "python", "name": None, "column": "words"}},
        r"^data.column='words' says nothing with data.source='python'; leave it out$",
    ),
    "rows of text": (
        {"data": {"train_rows": 9}},
        r"^data.train_rows=9 says nothing with model.task='text-generation'; leave it out$",
    ),
    "tokens of classes": (
        {"model": {"task": "text-classification"}, "data": {"source": "reviews", "name": None}},
        r"^data.held_out_tokens=512 says nothing with model.task='text-classification'; leave it out$",
    ),
    "push to nowhere": ({"hub": {"push": True}}, r"^hub.push=true needs hub.id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case, path):
    changes, message = WRONG[case]
    data = recipe("m", "o")
    for group, values in changes.items():
        data[group] = {**data.get(group, {}), **values}
    write(path, data)
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("trainer: {output: o}\ntrainer: {output: p}", r"the key 'trainer' stands twice"),
        ("trainer: [", r"^--config .*: not YAML: "),
        ("- 1", r"^--config .*: holds list; allowed: keys and values$"),
        ("trainer: 3", r"^trainer is 3; allowed: keys and values$"),
        (
            "a: !!python/object/apply:os.system ['true']",
            r"^--config .*: not YAML: could not determine",
        ),
    ],
)
def test_files_that_are_no_recipe(text, message, path):
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(path)
    assert "\n" not in str(caught.value)


def test_changes_and_files_that_cannot_be_read(path):
    write(path, recipe("m", "o"))
    for change in ("steps=3", "trainer.steps", "train.steps=3"):
        with pytest.raises(
            ValueError, match=r"^--set .* allowed: GROUP.KEY=VALUE with the groups model, "
        ):
            read_settings(path, [change])
    with pytest.raises(ValueError, match=r"^--config .*: No such file or directory; allowed: "):
        read_settings(path.with_name("none.yaml"))
