"""Random records, adapters and config files: each is read as what it says, or refused with one line, soon."""

import json
import time
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_hyperattn as ha
import hub_cards
from hf_hyperattn.integration.loading.checkpoint_files import read_config
from hf_hyperattn.registry import MECHANISMS

NAMES = sorted(MECHANISMS)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([10**400, -(2**63), 1e308, 1e-320]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["cone", "all", "last-third", "blend", "umbral", "x\ny", "\0", "inf"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


def mechanism(name: str):
    """A config of this mechanism with some of its fields set, to anything."""
    options = {f.name: JSON for f in fields(MECHANISMS[name].config)}
    return st.fixed_dictionaries({"mechanism": st.just(name)}, optional=options)


MECHANISM = st.one_of(JSON, st.sampled_from(NAMES).flatmap(mechanism))
RECORD = st.fixed_dictionaries(
    {"format": st.just(1) | JSON, "mechanisms": st.lists(MECHANISM, max_size=3) | JSON},
    optional={
        **dict.fromkeys(("layers", "heads", "mode", "include_cross_attention", "colour"), JSON),
        "hosts": JSON | st.lists(st.text(max_size=9), max_size=3),
        "overrides": JSON
        | st.dictionaries(st.text(max_size=9), st.lists(MECHANISM, max_size=2), max_size=2),
    },
)
ADAPTER = st.fixed_dictionaries(
    {"peft_type": st.just("LORA") | JSON},
    optional=dict.fromkeys(
        (
            "r",
            "target_modules",
            "modules_to_save",
            "task_type",
            "auto_mapping",
            "base_model_name_or_path",
        ),
        JSON,
    ),
)


def read_or_refused(read, *arguments):
    """What `read` makes of its arguments; None where it refuses them, in one line and in time."""
    start = time.process_time()
    try:
        return read(*arguments)
    except ValueError as error:
        assert 0 < len(str(error)) < 1500 and "\n" not in str(error), error
        return None
    finally:
        assert time.process_time() - start < 20


def rendered(config, adapter=None):
    return (
        hub_cards.render_adapter_card(config, adapter=adapter)
        if adapter
        else hub_cards.render_model_card(config)
    )


@settings(max_examples=300)
@given(RECORD)
def test_records(data):
    config = read_or_refused(ha.HyperAttnConfig.from_dict, data)
    if config is not None:
        assert ha.HyperAttnConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        card = rendered(config.to_dict()) if config.mechanisms else None
        assert card is None or card.text.count("\n## Limits\n") == 1


@settings(max_examples=100)
@given(RECORD, ADAPTER)
def test_cards(data, adapter):
    """A card is rendered from files that may come from anywhere."""
    for card in (read_or_refused(rendered, data), read_or_refused(rendered, data, adapter)):
        assert card is None or card.text.count("card rendered by hf-hyperattn") == 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(str.encode),
        JSON.map(lambda v: json.dumps(v).encode()),
    )
)
def test_files(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    data = read_or_refused(read_config, tmp_path)
    assert data is None or data == json.loads(content) or "NaN" in str(content)
    read_or_refused(ha.HyperAttnConfig.from_pretrained, tmp_path / "config.json")
    for name in ("adapter_config.json", "hyperattn_config.json"):
        (tmp_path / name).write_bytes(content)
        read_or_refused(hub_cards.card_for_directory, tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "content", ["[" * 10**6, '{"x":' * 10**5 + "1" + "}" * 10**5, '{"a": ' + "9" * 5000 + "}"]
)
def test_files_that_are_made_to_break_readers(content, tmp_path):
    """Nesting beyond the stack, and numbers beyond what Python converts."""
    (tmp_path / "config.json").write_text(content)
    for read in (read_config, hub_cards.card_for_directory):
        assert read_or_refused(read, tmp_path) is None
    assert read_or_refused(ha.HyperAttnConfig.from_pretrained, tmp_path / "config.json") is None
