"""What every client script shares: the loopback Hub's state and faults, and one printed JSON of facts."""

import json
import os
import sys
import urllib.request
from pathlib import Path

from hub_cards import explain_hub_error

WRONG_TOKEN = "hf_thisisnotatoken"
WORK = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("work")


def _ask(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(os.environ["HF_ENDPOINT"] + path, data=data)) as answer:
        return json.loads(answer.read())


def state(repo: str) -> dict:
    """``exists``, ``private``, ``commits`` and ``files`` (path -> oid) of a repository."""
    return _ask(f"/_loopback/repo/{repo}")


def arm(what: str, path: str = "", times: int = 1) -> None:
    """Have the server drop the next connections of this kind; see ``Hub.arm``."""
    _ask("/_loopback/fault", {"what": what, "path": path, "times": times})


def tiny_llama(seed: int = 0):
    """A random two-layer Llama that every client can afford."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def gap(model, other) -> float:
    """Largest logit difference between two models on one fixed input; NaN counts as infinite."""
    import torch

    ids = torch.arange(12)[None]
    with torch.no_grad():
        difference = (model.eval()(ids).logits - other.eval()(ids).logits).abs().max().item()
    return difference if difference == difference else float("inf")


def remote_text(repo: str, path: str = "README.md") -> str:
    """A file of main, as the Hub would serve it."""
    request = urllib.request.Request(
        f"{os.environ['HF_ENDPOINT']}/{repo}/resolve/main/{path}",
        headers={"Authorization": f"Bearer {os.environ['HF_TOKEN']}"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return answer.read().decode()


def refused(call) -> dict:
    """Run ``call``, which must fail; gives the exception's class name, its message and our one line."""
    try:
        call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "notes": getattr(error, "__notes__", []),
            "cause": explain_hub_error(error, "the call"),
        }
    raise AssertionError("the call was expected to fail")


def report(facts: dict) -> None:
    """Print the facts as the last line of the client's output."""
    print(json.dumps(facts, default=str))
