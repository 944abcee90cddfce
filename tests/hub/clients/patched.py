"""Publish what the plugin makes: a patched model, a private one, a sharded one, an adapter, a config; and fail to."""

from common import WORK, WRONG_TOKEN, arm, gap, refused, remote_text, report, state, tiny_llama
from huggingface_hub import HfApi
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.hub import PushToHubMixin

import hf_hyperattn as ha
import hub_cards
import hyperattn_cli
from hub_cards.uploads import HOOKED

REPO = "tester/patched"
load = AutoModelForCausalLM.from_pretrained


def stir(model) -> None:
    """Give every added parameter a value, so that a copy that lost one shows."""
    import torch

    for name, parameter in model.named_parameters():
        if "hyper" in name:
            parameter.data = torch.randn_like(parameter)


def patched():
    """A tiny patched model that no longer equals its base."""
    model, base = ha.patch_model(tiny_llama(), ha.ConeConfig(gamma=0.5), layers=[1]), tiny_llama()
    same = gap(model, base)
    stir(model)
    return model, {"gap_at_start": same, "gap_stirred": gap(model, base)}


def models(model) -> dict:
    """Pushed, and loaded by people who only import the plugin."""
    model.push_to_hub(REPO)
    model.push_to_hub("tester/patched-private", private=True)
    model.push_to_hub("tester/patched-shards", max_shard_size="20KB")
    again = load(REPO)
    again.push_to_hub("tester/patched-again")
    names = ("tester/patched-private", "tester/patched-shards", "tester/patched-again")
    shards = [
        name for name in state("tester/patched-shards")["files"] if name.endswith(".safetensors")
    ]
    body = gap_bodies(model, AutoModel.from_pretrained(REPO))
    return {
        "gaps": {
            REPO: gap(model, again),
            **{name: gap(model, load(name)) for name in names},
            "bare": body,
        },
        "private": state("tester/patched-private")["private"],
        "files": sorted(state(REPO)["files"]),
        "shards": len(shards),
        "card": remote_text(REPO),
        "shards_card": remote_text("tester/patched-shards"),
        "added": sum(p.numel() for n, p in model.named_parameters() if "hyper" in n.split(".")),
        "gates": [min(gates(model)), max(gates(model))],
    }


def gates(model) -> list[float]:
    return [x for n, p in model.named_parameters() if n.endswith(".gate") for x in p.tolist()]


def gap_bodies(model, bare) -> float:
    """Largest difference of the last hidden states of a head model's body and a bare model."""
    import torch

    ids = torch.arange(12)[None]
    with torch.no_grad():
        one, other = model.model.eval()(ids), bare.eval()(ids)
    return (one.last_hidden_state - other.last_hidden_state).abs().max().item()


def adapters() -> dict:
    """LoRA beside the added parameters, on a patched base from the Hub; only the adapter is pushed."""
    base = load(REPO)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["hyper"]
    )
    model = get_peft_model(base, config)
    stir(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    model.push_to_hub("tester/patched-lora")
    card, names = remote_text("tester/patched-lora"), {}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    return {
        "lora_gaps": [
            gap(model, load("tester/patched-lora")),
            gap(model, AutoPeftModelForCausalLM.from_pretrained("tester/patched-lora")),
            gap(model, names["model"]),
        ],
        "lora_changed": gap(model, load(REPO)),
        "lora_files": sorted(state("tester/patched-lora")["files"]),
        "lora_card": card,
    }


def configs(model) -> dict:
    """A config of its own, and a model patched with it."""
    config = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.5)], layers=[1])
    config.push_to_hub("tester/patched-config")
    back = ha.HyperAttnConfig.from_pretrained("tester/patched-config")
    other = ha.patch_model(tiny_llama(), back)
    other.load_state_dict(model.state_dict())
    return {
        "config_equal": back.to_dict() == config.to_dict(),
        "config_gap": gap(model, other),
        "config_files": sorted(state("tester/patched-config")["files"]),
        "config_card": remote_text("tester/patched-config"),
    }


def faults(model) -> dict:
    """A dropped commit and a wrong token, after which everything is as it was."""
    before, kept = state(REPO), {name: value.clone() for name, value in model.state_dict().items()}
    model.push_to_hub(REPO)
    facts = {"same_push": state(REPO) == before}
    model.model.norm.weight.data.mul_(2)
    arm("commit", REPO)
    facts["dropped"] = refused(lambda: model.push_to_hub(REPO))
    facts["wrong_token"] = refused(lambda: model.push_to_hub(REPO, token=WRONG_TOKEN))
    facts["wrong_token_new"] = refused(
        lambda: model.push_to_hub("tester/patched-never", token=WRONG_TOKEN)
    )
    config = ha.HyperAttnConfig([ha.ConeConfig()])
    facts["wrong_token_config"] = refused(
        lambda: config.push_to_hub("tester/patched-never", token=WRONG_TOKEN)
    )
    facts |= {"unchanged": state(REPO) == before, "never": state("tester/patched-never")}
    model.load_state_dict(kept)
    return facts | {"gap_after_faults": gap(model, load(REPO, force_download=True))}


def saves(model) -> dict:
    """``save_pretrained`` with a push, into a directory with a person's README.md."""
    place = WORK / "mine"
    place.mkdir(parents=True)
    (place / "README.md").write_text("# Mine\n")
    with hub_cards.own_card_kept(place):
        model.save_pretrained(place, push_to_hub=True, repo_id="tester/patched-saved")
    local = gap(model, load(place))
    return {
        "saved_gaps": [local, gap(model, load("tester/patched-saved"))],
        "own": (place / "README.md").read_text(),
    }


def commands(model) -> dict:
    """`hyperattn push`: over a sharded copy, over a person's card, and into a public place although --private."""
    repo, place = "tester/patched-command", WORK / "command"
    model.push_to_hub(repo, private=True, max_shard_size="20KB")
    model.save_pretrained(place)
    tried = [hyperattn_cli.main(["push", str(place), repo, "--private"])]
    files, back, card = state(repo)["files"], gap(model, load(repo)), remote_text(repo)
    HfApi().upload_file(
        path_or_fileobj=b"---\nlicense: mit\n---\n# Theirs\n",
        path_in_repo="README.md",
        repo_id=repo,
    )
    tried += [
        hyperattn_cli.main(["push", str(place), repo]),
        hyperattn_cli.main(["push", str(place), REPO, "--private"]),
    ]
    return {
        "command_codes": tried,
        "command_files": sorted(files),
        "command_gap": back,
        "command_card": card,
        "command_theirs": remote_text(repo),
    }


if __name__ == "__main__":
    hooked = hasattr(PushToHubMixin._upload_modified_files, HOOKED)
    hub_cards.hook_uploads(PushToHubMixin)
    tiny, first = patched()
    report(
        {"hooked": hooked}
        | first
        | models(tiny)
        | adapters()
        | configs(tiny)
        | faults(tiny)
        | saves(tiny)
        | commands(tiny)
    )
