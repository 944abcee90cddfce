"""A patched model as a part of another one, and `init_weights` on it: nothing that was learned is drawn again."""

import copy

import peft
import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Window
from tests.integration.architectures.collaborative import quiet
from tests.integration.models import TEXT, bert, difference, llama, run, text_inputs

MECHANISMS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(max_length=64),
    "hsa": ha.HsaConfig(windows=(2, 4)),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "trilinear": ha.TrilinearConfig(windows=(4, 3)),
}


def move_added(model) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))


def trained(config, model):
    ha.patch_model(model, config)
    move_added(model)
    return model.eval()


def state(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_kept(before: dict, model, prefix: str = "") -> None:
    after = model.state_dict()
    assert all(torch.equal(tensor, after[prefix + name]) for name, tensor in before.items())


def decoder():
    config = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return hf.BertLMHeadModel(config).eval()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_encoder_keeps_what_it_learned_when_it_is_composed(mechanism, tmp_path):
    encoder = trained(MECHANISMS[mechanism], bert())
    before, inputs = state(encoder), text_inputs()
    expected = encoder(**inputs).last_hidden_state
    model = hf.EncoderDecoderModel(encoder=encoder, decoder=decoder()).eval()
    assert_kept(before, model, "encoder.")
    call = inputs | dict(decoder_input_ids=inputs["input_ids"][:, :5])
    torch.testing.assert_close(model(**call).encoder_last_hidden_state, expected)
    model.save_pretrained(tmp_path)
    again = hf.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert_kept(before, again, "encoder.")
    torch.testing.assert_close(again(**call).encoder_last_hidden_state, expected)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "sparse"])
def test_init_weights_draws_nothing_again(mechanism):
    config = MECHANISMS.get(mechanism, ha.SparseConfig(Window(4)))
    model = trained(config, llama())
    before = state(model)
    model.init_weights()
    assert_kept(before, model)
    other = copy.deepcopy(model)
    other.init_weights()
    other.post_init()
    assert_kept(before, other)
    ha.unpatch_model(other)
    ha.patch_model(other, config)
    fresh = ha.patch_model(llama(), config).state_dict()
    again = other.state_dict()
    assert all(torch.equal(again[name], fresh[name]) for name in fresh if ".hyper." in name)


def test_init_weights_keeps_what_was_loaded(tmp_path):
    model = trained(ha.ConeConfig(), llama())
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    again.init_weights()
    assert_kept(state(model), again)


def test_init_weights_keeps_shared_projections():
    torch.manual_seed(0)
    stock = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)).eval()
    with quiet():
        model = ha.convert(stock, ha.CollaborativeConfig(rank=16, steps=3))
    before = state(model)
    model.init_weights()
    assert_kept(before, model)


def test_init_weights_keeps_what_adapters_brought():
    for config in (ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], r=2), None):
        model = llama() if config else ha.patch_model(llama(), ha.ConeConfig())
        adapted = peft.get_peft_model(model, config or ha.lora_config(model, r=2))
        move_added(adapted)
        before = {name: tensor for name, tensor in state(adapted).items() if ".hyper." in name}
        assert before
        adapted.base_model.model.init_weights()
        assert_kept(before, adapted)


def test_what_is_missing_in_a_checkpoint_still_starts_anew(tmp_path):
    """A record whose tensors start anew, as `fresh_patch` allows, gets starting values and not old memory."""
    model = trained(ha.HeadFusionConfig(), llama())
    model.save_pretrained(tmp_path)
    stock = llama()
    stock.load_state_dict(
        {name: t for name, t in model.state_dict().items() if ".hyper." not in name}
    )
    weights = stock.state_dict()
    with ha.fresh_patch():
        again = hf.LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=weights)
    fresh = ha.patch_model(llama(), ha.HeadFusionConfig()).state_dict()
    found = again.state_dict()
    assert all(torch.equal(found[name], fresh[name]) for name in fresh if ".hyper." in name)
    assert difference(run(stock, text_inputs()), run(again, text_inputs())) == 0
