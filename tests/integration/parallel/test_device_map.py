"""Conversion and injection of models whose weights are elsewhere: the same results, a layer's weights at a time."""

from __future__ import annotations

import weakref

import accelerate
import pytest
import torch
import transformers as hf
from packaging.version import Version

import hf_hyperattn as ha
from hf_hyperattn.inject import hsa
from hf_hyperattn.inject.causal import CausalInjection
from hf_hyperattn.inject.encoder import EncoderInjection
from tests.integration.architectures.collaborative import quiet
from tests.integration.models import TEXT

LAYERS = 6
SIZES = TEXT | dict(
    hidden_size=32, num_hidden_layers=LAYERS, max_position_embeddings=128, initializer_range=0.2
)


class Weights(dict):
    """A state dict that hands out copies, and knows how many of their bytes are in use."""

    def __init__(self, state_dict):
        super().__init__(state_dict)
        self.used = self.most = 0

    def __getitem__(self, name):
        array = super().__getitem__(name).numpy().copy()
        self.used += array.nbytes
        self.most = max(self.most, self.used)
        weakref.finalize(array, self.free, array.nbytes)
        return torch.from_numpy(array)  # which keeps the array until its memory is freed

    def free(self, count: int) -> None:
        self.used -= count


def model_of(family: str):
    torch.manual_seed(0)
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    cls, config = {
        "bert": (hf.BertModel, hf.BertConfig(**SIZES)),
        "gpt2": (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=LAYERS, n_head=4),
        ),
    }[family]
    return cls(config).eval()


def offloaded(family: str, how: str, folder):
    """The model with its weights elsewhere, and what counts those in use."""
    model = model_of(family)
    if how == "memory":
        weights = Weights({n: t.clone() for n, t in model.state_dict().items()})
        return accelerate.cpu_offload(model, torch.device("cpu"), state_dict=weights), weights
    model.save_pretrained(folder / "saved")
    head = {"lm_head": "cpu"} if family == "llama" else {}
    if not head and Version(accelerate.__version__) < Version("1.13"):
        pytest.skip("this Accelerate puts no whole model on disk")
    places = head | {name: "disk" for name, _ in model.named_children() if name not in head}
    return type(model).from_pretrained(
        folder / "saved", device_map=places, offload_folder=str(folder)
    ).eval(), None


def bytes_of(*modules) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


class Quiet:
    def describe(self, text):
        pass

    def advance(self, steps):
        pass


def inject(model, family: str) -> dict:
    length = 64
    texts = [
        {"text": torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(s))}
        for s in range(3)
    ]
    if family == "bert":
        texts = [{"text": ids[None].expand(2, -1)} for part in texts for ids in part.values()]
        made = EncoderInjection(model, texts, hsa.layer_candidates(length)[:2], length, 0.5)
    else:
        made = CausalInjection(model, texts, hsa.candidates(length)[::40], length, 0.5, rows=16)
    report = made.run(Quiet())
    measured = made.costs if family == "bert" else made.measured[0].costs
    return {
        "report": report["texts"],
        "pairs": report["pairs"],
        "measured": measured,
        "config": model.config.hyperattn,
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["memory", "disk"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_injection_into_an_offloaded_model(family, how, tmp_path):
    plain = model_of(family)
    expected = inject(plain, family)
    model, weights = offloaded(family, how, tmp_path)
    found = inject(model, family)
    assert found["config"] == expected["config"] and found["pairs"] == expected["pairs"]
    for name, costs in expected["measured"].items():
        assert torch.allclose(found["measured"][name], costs, rtol=1e-4, atol=1e-9)
    assert all(p.requires_grad for p in model.parameters())
    if weights is not None:
        layer = plain.model.layers[0] if family == "llama" else plain.encoder.layer[0]
        ends = [plain.get_input_embeddings(), *filter(None, [plain.get_output_embeddings()])]
        assert weights.most <= 1.1 * bytes_of(layer, *ends) < 0.5 * bytes_of(plain)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("how", ["memory", "disk"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_conversion_of_an_offloaded_model(family, how, keep, tmp_path):
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    config = ha.CollaborativeConfig(rank=12, steps=5)
    plain = model_of(family)
    start = plain(ids)[0]
    model, weights = offloaded(family, how, tmp_path)
    if weights is not None:
        weights.most = weights.used
    with quiet(), torch.no_grad():
        expected = ha.convert(plain, config)(ids)[0]
        ha.convert(model, config, keep_original=keep)
        if weights is not None:
            assert weights.most <= bytes_of(model_of(family)) / LAYERS
        assert (model(ids)[0] - expected).abs().max() <= 1e-5
        if how == "disk":  # Transformers saves what it has offloaded itself
            model.save_pretrained(tmp_path / "converted")
            again = type(plain).from_pretrained(tmp_path / "converted")(ids)[0]
            assert (again - expected).abs().max() <= 1e-5
        if keep:
            ha.unpatch_model(model)
            assert (model(ids)[0] - start).abs().max() <= 1e-5
        elif weights is not None:
            assert sum(t.nbytes for t in weights.values()) < sum(
                t.nbytes for t in model_of(family).state_dict().values()
            )


def test_without_weights_nothing_is_converted():
    with torch.device("meta"):
        model = model_of("bert")
    with pytest.raises(
        ValueError, match="on the meta device, without weights; allowed: a model in memory"
    ):
        ha.convert(model, ha.CollaborativeConfig(rank=12))
