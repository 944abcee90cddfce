"""What head_fusion and talking_heads must both do in a model; the tests of either call these with its config."""

from __future__ import annotations

import torch
from peft import PeftModel, get_peft_model

import hf_hyperattn as ha
from tests.integration.lessons import LESSONS, learn, logits, next_character
from tests.integration.models import FAMILIES, State, difference, perturb, real, run, tensors, train
from tests.integration.test_families import generate, inputs_of, model_of
from tests.zoo.inputs import words

#: Those that the contract names come first.
NAMED = ("llama", "gpt2", "bert", "vit", "bart", "mistral", "qwen3")
GENERATORS = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3", "bart", "t5", "whisper")


def there_and_back(family: str, config, tmp_path) -> None:
    """Identity, training, exact reload, and the original given back bit for bit."""
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    model.save_pretrained(tmp_path)  # Transformers notes dtype and class in the config of what it saves
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) <= 1e-5
    assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5
    body = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    train(model, inputs)
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added and all(p.grad is not None and p.grad.isfinite().all() and p.any() for p in added.values())
    expected = run(model, inputs)
    assert difference(before, expected) > 1e-4
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    with torch.no_grad():
        model.load_state_dict(body, strict=False)
    ha.unpatch_model(model)
    fresh = [
        f for f in state.differences(State(model)) if not f.startswith(("model.config.", "model.config"))
    ]
    assert fresh == [] and difference(before, run(model, inputs)) == 0


def computed_identity(family: str, config) -> None:
    """What the mechanism itself computes where it starts, not the shortcut that skips it."""
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    before = run(model, inputs)
    ha.patch_model(model, config)
    for module in model.modules():
        if hasattr(module, "idle"):
            module.idle = lambda: False
    assert difference(before, run(model, inputs)) <= 1e-5


def caches(family: str, config) -> None:
    """Greedy generation with a dynamic and a static cache writes what it writes without."""
    model = ha.patch_model(model_of(family, "eager"), config)
    perturb(model)
    inputs = inputs_of(family, model)
    plain = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, use_cache=True), plain)
    assert torch.equal(generate(model, inputs, cache_implementation="static", disable_compile=True), plain)


def padding(family: str, config) -> None:
    """A row padded at its left gives what it gives alone."""
    model = ha.patch_model(model_of(family, "eager"), config)
    perturb(model)
    ids = words(model.config)
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], 1)
        mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
        positions = (torch.arange(padded.shape[1]) - 3).clamp_min(0).expand_as(padded)
        found = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


def beside_lora(name: str, config, tmp_path) -> None:
    """An adapter of LoRA and `hyper` learns, is switched off, and comes back exactly."""
    batch = LESSONS[name][1]()

    def fresh():
        torch.manual_seed(0)
        return ha.patch_model(LESSONS[name][0](), config).train()

    original, base = logits(fresh(), batch), fresh()
    model = get_peft_model(base, ha.lora_config(base, r=4, lora_alpha=8))
    losses = learn(model, batch, 8)
    assert losses[-1] < losses[0]
    trained = logits(model, batch)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, batch), original, atol=1e-6, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(fresh(), tmp_path), batch), trained)


def checkpointed(config, reentrant: bool) -> None:
    """Gradient checkpointing changes no gradient."""
    gradients = []
    for how in (None, {"use_reentrant": reentrant}):
        torch.manual_seed(0)
        model = ha.patch_model(LESSONS["llama"][0](), config).train()
        perturb(model)
        if how is not None:
            model.gradient_checkpointing_enable(how)
            model.enable_input_require_grads()
        model(**next_character()).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])
    assert all(g.any() for n, g in gradients[0].items() if ".hyper." in n)


def half_precision(config, dtype: torch.dtype) -> None:
    model = ha.patch_model(model_of("llama", "eager"), config)
    perturb(model)
    ids = words(model.config, length=100)
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        got = model.to(dtype)(input_ids=ids).logits
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=2e-2, rtol=0)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(
        p.grad.isfinite().all() and p.grad.any() for n, p in model.named_parameters() if ".hyper." in n
    )


def autocast(config) -> None:
    model = ha.patch_model(model_of("llama", "eager"), config)
    perturb(model)
    ids = words(model.config, length=60)
    exact = model(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=ids)
    torch.testing.assert_close(found.logits.float(), exact, atol=3e-2, rtol=0)
    found.logits.float().square().mean().backward()
    assert all(p.grad.dtype == p.dtype for n, p in model.named_parameters() if ".hyper." in n)


def compiled(config) -> None:
    """One graph for all lengths, the same numbers; and an exported model."""
    torch._dynamo.reset()
    model = ha.patch_model(FAMILIES["llama"][0](num_hidden_layers=1), config)
    perturb(model)
    once = torch.compile(model, fullgraph=True, backend="eager")
    for inputs in (FAMILIES["llama"][1](), {"input_ids": words(model.config, length=17)}):
        inputs["use_cache"] = False
        assert difference(run(model, inputs), run(once, inputs)) <= 1e-5
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
    given = {"input_ids": words(model.config, length=13), "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=length).module()
    assert difference(run(model, inputs), run(exported, inputs)) <= 1e-5


def real_checkpoint(model, inputs: dict, config, directory) -> None:
    """A pretrained model: identity, also where it is computed; exact reload; the original to the last bit."""
    model.save_pretrained(directory / "plain")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) <= 1e-5
    assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5
    layers = [m for m in model.modules() if hasattr(m, "idle")]
    for layer in layers:
        layer.idle = lambda: False
    assert difference(before, run(model, inputs)) <= 2e-6 * max(t.abs().max() for t in before.values()) + 1e-5
    for layer in layers:
        del layer.idle
    perturb(model, 0.02)
    expected = run(model, inputs)
    assert difference(before, expected) > 1e-3
    model.save_pretrained(directory / "patched")
    again = type(model).from_pretrained(directory / "patched", dtype=torch.float32)
    assert difference(expected, run(again, inputs)) == 0
    ha.unpatch_model(model)
    assert state.differences(State(model)) == [] and difference(before, run(model, inputs)) == 0


def real_generation(model, inputs: dict, config) -> None:
    """Greedy generation of a pretrained model, with and without a cache, alone and padded."""
    ha.patch_model(model, config)
    perturb(model, 0.02)
    alone = {k: v[1:, v.shape[1] - int(inputs["attention_mask"][1].sum()) :] for k, v in inputs.items()}
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(**alone, use_cache=False, **how)
    assert torch.equal(model.generate(**alone, **how), expected)
    padded = {k: torch.cat([torch.zeros_like(v[:, :5]), v], 1) for k, v in alone.items()}
    assert torch.equal(model.generate(**padded, **how)[:, 5:], expected)
