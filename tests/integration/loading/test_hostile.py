"""A config.json from somebody hostile gives one clear line, at once, and runs no code."""

import copy
import json
import os
import sys
import time

import pytest
import transformers as hf
from peft import PeftModel
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from tests.integration.models import FAMILIES, State, difference, llama, perturb, run, text_inputs

HOST = "model.layers.0.self_attn"
GOOD = ha.HyperAttnConfig([ha.ConeConfig()], hosts=[HOST]).to_dict()
HUGE = "x" * 10_000_000


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = {
    "format": [True, None, "1", 1.0, [1], 0, -1, 2, 10**300, 10**5000, float("nan")],
    "mechanisms": [
        *(
            {},
            "cone",
            5,
            True,
            None,
            [],
            0,
            "",
            [5],
            ["cone"],
            [None],
            [[]],
            [{}],
            [{"mechanism": 5}],
        ),
        *(
            [{"mechanism": name}]
            for name in ("../../x", "__class__", "os.system", "cone ", "CONE", "", HUGE)
        ),
        GOOD["mechanisms"] * 2,
        GOOD["mechanisms"] * 20_000,
        [nested(900)],
        [GOOD["mechanisms"][0] | {"__class__": "os.system"}],
        [GOOD["mechanisms"][0] | {HUGE: 1}],
    ],
    "hosts": [
        *(
            "a",
            {},
            5,
            True,
            [],
            [5],
            [None],
            [["a"]],
            [HOST, HOST],
            [""],
            ["lm_head"],
            ["model"],
            [HOST + ".q_proj"],
        ),
        *(
            ["../../../etc/passwd"],
            ["__class__"],
            ["model.__class__"],
            [HUGE],
            ["a"] * 100_000,
            [nested(900)],
        ),
        [f"model.layers.{i}.attention" for i in range(-9_000, 0)],
    ],
    "heads": [
        {},
        5,
        True,
        [],
        "a",
        HUGE,
        [1.5],
        [True],
        ["0"],
        [None],
        [-5],
        [4],
        [10**5000],
        list(range(20_000)),
        [[]],
    ],
    "mode": [None, 5, True, [], {}, "x", HUGE, "__import__('os')"],
    "include_cross_attention": [None, 5, "yes", [], {}],
    "layers": [
        {},
        True,
        1.5,
        5,
        HUGE,
        "first-" + "9" * 10_000,
        "every-0th",
        nested(900),
        ["0"],
        [1.5],
    ],
    "evil": [1],
    HUGE: [1],
}
CONE_VALUES = {
    "gamma": [
        float("nan"),
        float("inf"),
        -1,
        0,
        "1",
        [1],
        {},
        None,
        True,
        10**400,
        10**5000,
        1e300,
        nested(900),
        HUGE,
    ],
    "variant": [None, 5, "x", ["umbral"], {}, nested(900), HUGE],
    "mapping": [5, "x", [], {}],
    "squared": [None, 1, "true"],
}


def cases() -> dict:
    found = {
        f"{key[:9]}-{i}": GOOD | {key: v}
        for key, values in VALUES.items()
        for i, v in enumerate(values)
    }
    for key, values in CONE_VALUES.items():
        for i, value in enumerate(values):
            found[f"cone.{key}-{i}"] = GOOD | {"mechanisms": [GOOD["mechanisms"][0] | {key: value}]}
    whole = [
        0,
        1,
        True,
        "",
        "cone",
        [],
        [GOOD],
        {},
        {"format": 1, "mechanisms": {}},
        nested(900),
        float("nan"),
        HUGE,
    ]
    return found | {f"whole-{i}": value for i, value in enumerate(whole)}


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_and_no_model(case):
    config = copy.copy(llama().config)
    config.hyperattn = CASES[case]
    before, modules = time.process_time(), set(sys.modules)
    with pytest.raises(ValueError) as caught:
        AutoModelForCausalLM.from_config(config)
    assert time.process_time() - before < 20
    message = str(caught.value)
    assert "\n" not in message and 20 < len(message) < 600, message[:1000]
    assert "allowed" in message or "reads 1 to" in message or "does not have" in message
    assert not {m for m in set(sys.modules) - modules if m.startswith(("os.", "posix", "x"))}


def test_thousands_of_layers_that_the_model_lacks_are_one_short_warning(caplog):
    """A model may be loaded with fewer layers than were saved."""
    config, before = copy.copy(llama().config), time.process_time()
    config.hyperattn = GOOD | {"hosts": [f"model.layers.{i}.self_attn" for i in range(9_000)]}
    model = AutoModelForCausalLM.from_config(config)
    assert time.process_time() - before < 20 and len(model.config.hyperattn["hosts"]) == 4
    (record,) = [r for r in caplog.records if r.name == "hf_hyperattn"]
    assert (
        record.getMessage().endswith("model.layers.11.self_attn and 8988 more")
        and len(record.getMessage()) < 600
    )


@pytest.mark.parametrize(
    "hyperattn", [GOOD | {"mode": "x"}, GOOD | {"hosts": ["nowhere"]}, [1], "cone"], ids=str
)
def test_from_a_checkpoint(hyperattn, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    path.write_text(
        json.dumps(data | {"hyperattn": hyperattn, "attn_implementation": "hf_hyperattn"})
    )
    with pytest.raises(ValueError, match="allowed") as caught:
        type(model).from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


STOCK = [
    "hf_hyperattn",
    "cone",
    5,
    None,
    [],
    {},
    "nobody/nothing",
    "nobody/nothing:os.system",
    "../../x",
    HUGE,
    "flash_attention_2",
]


@pytest.mark.parametrize("stock", STOCK, ids=lambda s: str(s)[:20])
def test_whatever_the_note_of_the_implementation_from_before_says(stock, tmp_path):
    """It is a name out of those that are registered here, or it is not used; nothing is fetched for it."""
    model, inputs = ha.patch_model(llama(), ha.ConeConfig()), text_inputs()
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hyperattn_stock": stock}))
    again = type(model).from_pretrained(tmp_path)
    assert difference(expected, run(again, inputs)) == 0
    assert ha.unpatch_model(again).config._attn_implementation == "sdpa"
    assert difference(expected, run(again, inputs)) == 0


def test_the_note_of_a_family_that_has_no_sdpa(tmp_path, monkeypatch):
    monkeypatch.setattr(
        hf.Gemma2PreTrainedModel, "_supports_sdpa", False
    )  # Transformers 5.17 says it has
    make, inputs = FAMILIES["gemma2"]
    model, inputs = ha.patch_model(make(), ha.ConeConfig()), inputs()
    perturb(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hyperattn_stock": "sdpa"}))
    again = type(model).from_pretrained(tmp_path)
    assert difference(expected, run(again, inputs)) == 0
    assert ha.unpatch_model(again).config._attn_implementation == "eager"


def test_parameters_by_name_from_a_stranger(tmp_path):
    model = llama()
    model.set_attn_implementation("cone")
    model.config.hyperattn = GOOD | {"hosts": None, "mode": "x"}
    with pytest.raises(ValueError, match="mode='x' is not allowed"):
        run(model, text_inputs())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[1]",
        "null",
        "[" * 100_000,
        '{"format": 1e999}',
        "\xff\xfe",
        '{"format": ' + "9" * 5000 + "}",
    ],
)
def test_a_file_of_our_own_that_is_no_config(text, tmp_path):
    path = tmp_path / "hyperattn_config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="allowed") as caught:
        ha.HyperAttnConfig.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_a_file_of_our_own_that_is_none(make, tmp_path):
    make(tmp_path / "hyperattn_config.json")
    with pytest.raises(ValueError, match="it is no regular file; allowed: a JSON object"):
        ha.HyperAttnConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["[", "[]", "null", "[" * 100_000], ids=lambda text: text[:5])
def test_an_adapter_config_that_is_none(text, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match="adapter_config.json: .*allowed: a JSON object") as caught:
        PeftModel.from_pretrained(llama(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_the_card_does_not_stop_a_save(tmp_path):
    os.mkfifo(tmp_path / "README.md")
    ha.patch_model(llama(), ha.ConeConfig()).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").is_fifo() and (tmp_path / "model.safetensors").is_file()


def test_a_refused_checkpoint_leaves_nothing_behind(tmp_path):
    model, inputs = llama(), text_inputs()
    expected, state = run(model, inputs), State(model)
    config = copy.deepcopy(model.config)
    config.hyperattn = GOOD | {"hosts": ["nowhere"]}
    with pytest.raises(ValueError, match="names the host 'nowhere'"):
        AutoModelForCausalLM.from_config(config)
    assert state.differences(State(model)) == []
    assert difference(expected, run(model, inputs)) == 0
    assert ha.describe(AutoModelForCausalLM.from_config(model.config))["patched"] == 0
