"""Cards on pushes of a stock model whose config says it is patched: ``hub_cards`` tested by itself."""

import io

from common import WORK, gap, remote_text, report, state, tiny_llama
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils.hub import PushToHubMixin

import hub_cards

SPEC = {
    "format": 1,
    "mode": "blend",
    "mechanisms": [{"mechanism": "cone", "variant": "umbral", "mapping": None, "gamma": 1.0}],
    "hosts": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    "heads": None,
}
OWN = "---\nlicense: mit\n---\n\n# My model\n\nWritten by hand.\n"


def patched():
    """A tiny model that claims to be patched, and a base model's name."""
    model = tiny_llama()
    model.config.hyperattn = SPEC
    model.config._name_or_path = "org/base"
    return model


def models() -> dict:
    """A first push, the same again, one over a card that a person wrote, one of an unpatched model."""
    model = patched()
    model.push_to_hub("tester/hooked")
    facts = {"first": remote_text("tester/hooked"), "commits": state("tester/hooked")["commits"]}
    model.push_to_hub("tester/hooked")
    facts["commits_after_same_push"] = state("tester/hooked")["commits"]
    model.config.hyperattn = SPEC | {"mode": "replace"}
    model.push_to_hub("tester/hooked", tags=["extra"])
    facts["refreshed"] = remote_text("tester/hooked")
    HfApi().upload_file(
        path_or_fileobj=io.BytesIO(OWN.encode()), path_in_repo="README.md", repo_id="tester/hooked"
    )
    model.model.norm.weight.data.mul_(2)
    model.push_to_hub("tester/hooked")
    facts["own_remote"] = remote_text("tester/hooked")
    facts["gap"] = gap(model, AutoModelForCausalLM.from_pretrained("tester/hooked"))
    tiny_llama().push_to_hub("tester/unpatched")
    return facts | {"unpatched": remote_text("tester/unpatched")}


def directories() -> dict:
    """``save_pretrained(push_to_hub=True)`` into a directory that holds a person's README.md."""
    model, place = patched(), WORK / "mine"
    place.mkdir(parents=True)
    (place / "README.md").write_text(OWN)
    with hub_cards.card_beside(place, model, pushed=True):
        model.save_pretrained(place, push_to_hub=True, repo_id="tester/saved")
    fresh, stock = WORK / "fresh", WORK / "stock"
    with hub_cards.card_beside(fresh, model):
        model.save_pretrained(fresh)
    with hub_cards.card_beside(stock, tiny_llama()):
        tiny_llama().save_pretrained(stock)
    return {
        "own_local": (place / "README.md").read_text(),
        "saved": remote_text("tester/saved"),
        "fresh": (fresh / "README.md").read_text(),
        "stock_has_card": (stock / "README.md").exists(),
    }


def adapters() -> dict:
    """A LoRA adapter whose base says it is patched: pushed, and saved to disk over PEFT's own placeholder."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["norm"]
    )
    model = get_peft_model(patched(), config)
    model.push_to_hub("tester/adapter")
    place = WORK / "adapter"
    model.save_pretrained(place)
    placeholder = (place / "README.md").read_text()
    written = hub_cards.write_card(place, config=SPEC, license="apache-2.0")
    return {
        "adapter": remote_text("tester/adapter"),
        "adapter_files": sorted(state("tester/adapter")["files"]),
        "adapter_placeholder": placeholder,
        "adapter_local": written.read_text(),
    }


if __name__ == "__main__":
    hub_cards.hook_uploads(PushToHubMixin)
    hub_cards.hook_uploads(PushToHubMixin)
    facts = models() | directories() | adapters()
    hub_cards.unhook_uploads(PushToHubMixin)
    patched().push_to_hub("tester/unhooked")
    report(facts | {"unhooked": remote_text("tester/unhooked")})
