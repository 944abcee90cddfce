"""Every integer in the record of a checkpoint, far out of range: refused in one sentence, or loaded in a few MB."""

import copy
import json
import resource
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_hyperattn as ha
from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.integration.architectures.hsa_encoder.configuration import HsaEncoderConfig
from hf_hyperattn.integration.architectures.hsa_encoder.modeling import HsaEncoder
from hf_hyperattn.registry import MECHANISMS
from hf_hyperattn.rules import Clusters, Exact, NestedWindows, Pages, VerticalSlash, Window
from tests.integration.models import FAMILIES, bert, llama, text_inputs

VALUES = (10**8, 10**18, 10**19, 10**30, 0, -1, True)
#: Bytes of a tensor, and of the whole process, that no load of these models comes near.
LARGEST, GROWTH = 4 * 2**20, 64 * 2**20
gpt2 = FAMILIES["gpt2"][0]

#: A record with every integer field set, and the model that it patches.
RECORDS = {
    "head_fusion": (llama, dict(size=4, seed=1)),
    "hsa": (llama, dict(windows=[2, 4], near=3, sinks=1, refine_top_k=2, tuned_length=100)),
    "hsa-heads": (llama, dict(near=[1, 2, 3, 4], sinks=[1] * 4, refine_top_k=[2] * 4)),
    "hype": (llama, dict(max_length=64)),
    "trilinear": (llama, dict(windows=[8, 4], tensor="cp", rank=4)),
    "collaborative": (gpt2, dict(rank=16, steps=3, seed=1)),
    "sparse-lengths": (
        llama,
        dict(
            lengths=[6, 12],
            rules=[[{"rule": "window", "near": 4, "sinks": 1}], [{"rule": "exact"}]],
        ),
    ),
    **{
        f"sparse-{rule.name}": (llama, dict(rules=[rule().to_dict()]))
        for rule in (Exact, Window, Pages, Clusters, NestedWindows, VerticalSlash)
    },
    **{
        f"sparse-{rule.name}-{query}": (llama, dict(rules=[rule(query=query).to_dict()]))
        for rule in (Pages, NestedWindows, Clusters)
        for query in ("first", "previous", "chunk")
    },
}
#: Mechanisms without an integer field.
WITHOUT = {"cone", "hyperbolic", "mkl", "talking_heads"}


class Allocated(TorchDispatchMode):
    """Notes the largest tensor that is made outside the meta device."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return made


def integers(data, at=()):
    """The places of all integers in JSON data."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from integers(value, (*at, key))
    elif isinstance(data, int) and not isinstance(data, bool):
        yield at


def changed(data, at: tuple, value):
    """A copy of JSON data with another value at one place."""
    data = copy.deepcopy(data)
    place = data
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return data


def load_within_bounds(load):
    """What `load` gives, or None where it refuses in one sentence; in either case without large allocations."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = None
    with Allocated() as allocated:
        try:
            loaded = load()
        except ValueError as error:
            message = str(error)
            assert "\n" not in message and len(message) < 600, message
            assert "allowed" in message or "asks for" in message, message
    assert allocated.largest < LARGEST
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH
    return loaded


def saved(name: str, folder: Path, mode: str):
    """A patched model saved into a folder, and its config.json."""
    make, fields = RECORDS[name]
    config = MechanismConfig.from_dict({"mechanism": name.partition("-")[0], **fields})
    model = ha.convert(make(), config) if getattr(config, "rank", None) == 16 else None
    model = model or ha.patch_model(make(), config, mode=mode)
    model.save_pretrained(folder)
    return type(model), json.loads((folder / "config.json").read_text())


def variants(name: str, folder: Path, mode: str):
    """Loads of the checkpoint with every integer of its mechanism's record at every value."""
    cls, config = saved(name, folder, mode)
    record = config["hyperattn"]["mechanisms"]
    places = list(integers(record))
    assert places or name == "sparse-exact"
    for at in places:
        for value in VALUES:
            config["hyperattn"]["mechanisms"] = changed(record, at, value)
            (folder / "config.json").write_text(json.dumps(config))
            yield load_within_bounds(lambda: cls.from_pretrained(folder))


def test_all_mechanisms_are_here():
    of_ours = {
        name for name, m in MECHANISMS.items() if m.config.__module__.startswith("hf_hyperattn")
    }
    assert of_ours <= {name.partition("-")[0] for name in RECORDS} | WITHOUT | {"hat", "score"}
    for name in WITHOUT:
        assert not list(integers(MECHANISMS[name].config().to_dict()))


@pytest.mark.parametrize(
    "name", [name for name in RECORDS if not name.endswith(("-first", "-previous", "-chunk"))]
)
def test_every_integer_of_a_record(name, tmp_path):
    for _ in variants(name, tmp_path, "blend"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_what_loads_runs_within_bounds(name, tmp_path):
    """windows=(2, 10**8) ended the process: the kernel made room for all children that a window may have."""
    inputs = text_inputs()
    for model in variants(name, tmp_path, "replace"):
        if model is None:
            continue
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Allocated() as allocated:
            model(**inputs).logits.sum().backward()
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert allocated.largest < LARGEST
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH


def test_an_override_is_bounded_too(tmp_path):
    host = "model.layers.0.self_attn"
    config = ha.HyperAttnConfig(
        [ha.HeadFusionConfig()], overrides={host: [ha.HeadFusionConfig(size=2)]}
    )
    model = ha.patch_model(llama(), config)
    model.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["hyperattn"]["overrides"][host][0]["size"] = 10**8
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match="HeadFusionConfig.size=100000000 is not allowed; allowed: 1 to 32"
    ):
        type(model).from_pretrained(tmp_path)


def test_the_largest_size_that_means_something():
    assert ha.patch_model(llama(), ha.HeadFusionConfig(size=32))
    with pytest.raises(ValueError, match="allowed: 1 to 32, the width of the hidden states"):
        ha.patch_model(llama(), ha.HeadFusionConfig(size=33))


@pytest.mark.parametrize("seed", [2**63 - 1, 0])
def test_the_largest_seed(seed, tmp_path):
    model = ha.patch_model(llama(), ha.HeadFusionConfig(seed=seed))
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("windows", [(2, 10**8), (3, 3 * 10**17), (4, 8, 2**40), (10**18,)])
def test_windows_beyond_the_text_are_its_root(windows):
    """The compiled kernel against torch's operators."""
    q, k, v = torch.randn(3, 1, 2, 37, 8, generator=torch.Generator().manual_seed(1))
    settings = dict(hierarchy=windows, tying="key", is_causal=True, near=2, sinks=1, refine_top_k=2)
    expected = ha.functional.hierarchical_attention(q.double(), k.double(), v.double(), **settings)
    found = ha.functional.hierarchical_attention(q, k, v, **settings)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["r", "rank_pattern", "mechanism"])
def test_an_adapter(kind, tmp_path):
    config = ha.HyperLoraConfig(
        mechanisms=[ha.HeadFusionConfig(size=4)], r=2, target_modules=["q_proj"]
    )
    get_peft_model(llama(), config).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    data = json.loads(path.read_text())
    for value in (10**8, 10**18):
        if kind == "mechanism":
            data["hyperattn"]["mechanisms"][0]["size"] = value
        else:
            data[kind] = value if kind == "r" else {"q_proj": value}
        path.write_text(json.dumps(data))
        assert load_within_bounds(lambda: PeftModel.from_pretrained(llama(), tmp_path)) is None


HAT = dict(segment_length=8, max_position_embeddings=32, cls_token_id=2, num_hidden_layers=2)
HSA = dict(
    max_position_embeddings=16, num_hidden_layers=1, sibling_size=4, vocab_size=20, hidden_size=16
)


@pytest.mark.parametrize("name", ["hat", "hsa_encoder"])
def test_the_configs_of_our_architectures(name, tmp_path):
    """Sizes that any model's config has (hidden_size, ...) are bounded by its weights; these are ours."""
    if name == "hat":
        model, fields = ha.convert(bert(), ha.HatConfig(segment_length=8, max_length=32)), HAT
    else:
        model, fields = HsaEncoder(HsaEncoderConfig(**HSA)), HSA
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in fields.keys() - {"hidden_size", "vocab_size"}:  # any model's config has those
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
            load_or_refuse(type(model), tmp_path)


def load_or_refuse(cls, folder) -> None:
    """As `load_within_bounds`; Transformers has other words for types and shapes that do not fit."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Allocated() as allocated:
        try:
            cls.from_pretrained(folder)
        except (ValueError, RuntimeError, TypeError, StrictDataclassError):
            pass
    assert allocated.largest < LARGEST
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH
