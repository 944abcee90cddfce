"""Programs of others take a patched checkpoint as it is: lm-eval's command and `transformers serve`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn as ha

from ..cli import tiny

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[2]
MODULES = ("fastapi", "uvicorn", "openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A patched Llama whose gates have moved, with a tokenizer and a chat template; its base beside it."""
    place = tmp_path_factory.mktemp("tools")
    model = AutoModelForCausalLM.from_pretrained(tiny.save(place / "base"))
    ha.patch_model(model, ha.ConeConfig())
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(place / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(place / "model")
    return place


TASK = """\
task: mine
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_lm_evals_command(folder, tmp_path):
    """Log-likelihoods that its command writes are those of the patched model, without an import of ours in it."""
    pytest.importorskip("lm_eval")
    rows = [{"question": "the fox", "choices": [" the cat", " a dog"], "answer": i % 2} for i in range(2)]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.json"))
    site = tmp_path / "site"  # as `hyperattn autoload on` does it, in a folder of this test's own
    site.mkdir()
    (site / "sitecustomize.py").write_text("import hf_hyperattn_autoload\nhf_hyperattn_autoload.register()\n")
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HYPERATTN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    line = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder / 'model'}"]
    line += ["--tasks", str(tmp_path / "task.yaml"), "--device", "cpu", "--log_samples"]
    line += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [float(answer[0][0]) for answer in json.loads(samples.read_text().splitlines()[0])["resps"]]
    for place, same in (("model", True), ("base", False)):
        expected = [likelihood(folder / place, folder / "model", "the fox", choice) for choice in rows[0]["choices"]]
        assert (max(abs(a - b) for a, b in zip(found, expected)) < 1e-3) == same


def likelihood(model: Path, tokenizer: Path, text: str, continuation: str) -> float:
    ids = AutoTokenizer.from_pretrained(tokenizer)(text, return_tensors="pt")["input_ids"]
    whole = AutoTokenizer.from_pretrained(tokenizer)(text + continuation, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logs = AutoModelForCausalLM.from_pretrained(model)(whole).logits.log_softmax(-1)
    after = whole[0, ids.shape[1] :]
    return float(logs[0, ids.shape[1] - 1 : -1].gather(-1, after[:, None]).sum())


@pytest.mark.parametrize("batching", [False, True], ids=["one by one", "continuous batching"])
def test_transformers_serve(folder, batching):
    for module in MODULES:
        pytest.importorskip(module)
    from transformers.cli.serve import Serve

    model = str(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = dict(cb_num_blocks=8, cb_max_batch_tokens=64) if batching else {}
    server = Serve(model, device="cpu", host="127.0.0.1", port=port, non_blocking=True,
                   continuous_batching=batching, log_level="error", **options)  # fmt: skip
    try:
        messages = [{"role": "user", "content": "the fox"}]
        asked = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": False}
        answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    finally:
        server.kill_server()
    assert answer == written(folder / "model", folder) != written(folder / "base", folder)


def ask(url: str, body: dict) -> dict:
    """The answer to a request, once the server is there."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(300):
        try:
            return json.loads(opener.open(request).read())
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:  # it does not listen yet
            time.sleep(0.2)
    raise TimeoutError(url)


def written(model: Path, folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("the fox", return_tensors="pt")["input_ids"]
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
