"""A stock tiny model against the loopback Hub: does the server itself speak the protocol?"""

from common import WORK, WRONG_TOKEN, arm, gap, refused, report, state, tiny_llama
from huggingface_hub import HfApi, file_download, snapshot_download
from transformers import AutoModelForCausalLM

from hub_cards.errors import LOST, explain_hub_error

REPO, GUEST = "tester/plain", "hf_loopbackguest"
load = AutoModelForCausalLM.from_pretrained


def pushes(model) -> dict:
    """Public, private, repeated, on a branch."""
    model.push_to_hub(REPO)
    model.push_to_hub("tester/hidden", private=True)
    facts = {"gap": gap(model, load(REPO)), "private_gap": gap(model, load("tester/hidden"))}
    facts |= {
        "plain": state(REPO),
        "hidden": state("tester/hidden"),
        "whoami": HfApi().whoami()["name"],
    }
    model.push_to_hub(REPO)
    facts["after_same_push"] = state(REPO)
    model.push_to_hub(REPO, revision="trial", commit_message="on a branch")
    return facts | {"branch_gap": gap(model, load(REPO, revision="trial"))}


def tokens(model) -> dict:
    """No token, a wrong one, one without rights."""
    facts = {
        "hidden_without_token": refused(lambda: HfApi(token=False).model_info("tester/hidden")),
        "hidden_for_guest": refused(lambda: HfApi(token=GUEST).model_info("tester/hidden")),
        "wrong_token_push": refused(lambda: model.push_to_hub("tester/never", token=WRONG_TOKEN)),
        "guest_push": refused(lambda: model.push_to_hub(REPO, token=GUEST)),
        "wrong_token_load": refused(lambda: load(REPO, token=WRONG_TOKEN, force_download=True)),
    }
    return facts | {"never": state("tester/never")}


def cut() -> None:
    """Fetch a repository whose weights never arrive."""
    snapshot_download(REPO, local_dir=WORK / "cut", force_download=True, max_workers=1)


def faults(model) -> dict:
    """Connections dropped in a commit, after it, and in downloads."""
    before = state(REPO)
    model.model.norm.weight.data.mul_(2)
    arm("commit", REPO)
    facts = {
        "dropped_commit": refused(lambda: model.push_to_hub(REPO)),
        "unchanged": state(REPO) == before,
    }
    arm("commit-answer", REPO)
    facts["dropped_answer"] = refused(lambda: model.push_to_hub(REPO))
    facts["whole_after_lost_answer"] = gap(model, load(REPO, force_download=True))
    file_download.time.sleep = lambda seconds: None
    arm("download", "model.safetensors")
    try:
        snapshot_download(REPO, local_dir=WORK / "resumed", force_download=True)
        facts["resumed_gap"] = gap(model, load(WORK / "resumed"))
    except Exception as error:
        if LOST not in explain_hub_error(error, "the call"):
            raise
        facts["resumed_gap"] = None
    arm("download", "model.safetensors", times=1000)
    facts["dropped_download"] = refused(cut)
    arm("none")
    return facts | {
        "cut_files": sorted(path.name for path in (WORK / "cut").iterdir() if path.is_file())
    }


if __name__ == "__main__":
    tiny = tiny_llama()
    report(pushes(tiny) | tokens(tiny) | faults(tiny))
