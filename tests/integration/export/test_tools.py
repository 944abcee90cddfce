"""Programs of others take a patched checkpoint as it is: lm-eval's command, `transformers serve` and `chat`."""

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn as ha
from tests.cli import tiny

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[3]
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
    rows = [
        {"question": "the fox", "choices": [" the cat", " a dog"], "answer": i % 2}
        for i in range(2)
    ]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.json"))
    site = tmp_path / "site"  # as `hyperattn autoload on` does it, in a folder of this test's own
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import hf_hyperattn_autoload\nhf_hyperattn_autoload.register()\n"
    )
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HYPERATTN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "OMP_NUM_THREADS": "1",
    }
    line = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={folder / 'model'}",
    ]
    line += ["--tasks", str(tmp_path / "task.yaml"), "--device", "cpu", "--log_samples"]
    line += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [
        float(answer[0][0]) for answer in json.loads(samples.read_text().splitlines()[0])["resps"]
    ]
    for place, same in (("model", True), ("base", False)):
        expected = [
            likelihood(folder / place, folder / "model", "the fox", choice)
            for choice in rows[0]["choices"]
        ]
        assert (max(abs(a - b) for a, b in zip(found, expected)) < 1e-3) == same


def likelihood(model: Path, tokenizer: Path, text: str, continuation: str) -> float:
    ids = AutoTokenizer.from_pretrained(tokenizer)(text, return_tensors="pt")["input_ids"]
    whole = AutoTokenizer.from_pretrained(tokenizer)(text + continuation, return_tensors="pt")[
        "input_ids"
    ]
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
    port = free_port()
    options = dict(cb_num_blocks=8, cb_max_batch_tokens=64) if batching else {}
    server = Serve(
        model,
        device="cpu",
        host="127.0.0.1",
        port=port,
        non_blocking=True,
        continuous_batching=batching,
        log_level="error",
        **options,
    )
    try:
        messages = [{"role": "user", "content": "the fox"}]
        asked = {
            "model": model,
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
            "stream": False,
        }
        answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", asked)["choices"][0][
            "message"
        ]["content"]
    finally:
        server.kill_server()
    assert answer == written(folder / "model", folder) != written(folder / "base", folder)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_transformers_chat(folder, tmp_path):
    """Its command, in a terminal, against the server: a message, the answer, and the chat that it saves."""
    for module in (*MODULES, "rich"):
        pytest.importorskip(module)
    from transformers.cli.serve import Serve

    model, port = str(folder / "model"), free_port()
    server = Serve(
        model, device="cpu", host="127.0.0.1", port=port, non_blocking=True, log_level="error"
    )
    line = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "chat",
        model,
        f"http://127.0.0.1:{port}/v1",
    ]
    line += ["max_new_tokens=8", "do_sample=False", "--user", "me"]
    try:
        wait_for(port)
        terminal = Terminal(line, tmp_path)
        for prompt, answer in (
            ("<me>:", "the fox"),
            ("Continue generating?", "n"),
            ("<me>:", "!save"),
        ):
            terminal.expect(prompt)
            terminal.send(answer)
        terminal.expect("Chat saved")
        terminal.expect("<me>:")
        terminal.send("!exit")
        assert terminal.wait() == 0
    finally:
        server.kill_server()
    (saved,) = Path(model).glob("chat_*.json")
    chat = json.loads(saved.read_text())["chat_history"]
    saved.unlink()
    assert [turn["role"] for turn in chat] == ["user", "assistant"] and chat[0][
        "content"
    ] == "the fox"
    assert (
        chat[1]["content"] == written(folder / "model", folder) != written(folder / "base", folder)
    )


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, line: list[str], folder: Path, seconds: float = 120):
        import pty

        environment = os.environ | {
            "TERM": "dumb",
            "COLUMNS": "200",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }
        self.end, self.shown, (self.file, inside) = time.monotonic() + seconds, "", pty.openpty()
        self.process = subprocess.Popen(
            line,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(inside)

    def expect(self, text: str) -> None:
        """Read until the text is shown; what was before it is let go."""
        while text not in self.shown:
            ready = select.select([self.file], [], [], 1)[0]
            try:
                self.shown += os.read(self.file, 4096).decode(errors="replace") if ready else ""
            except OSError as error:  # it has ended
                raise AssertionError(f"{text!r} was not shown: {self.shown[-3000:]}") from error
            if time.monotonic() > self.end:
                self.process.kill()
                raise AssertionError(f"{text!r} was not shown in time: {self.shown[-3000:]}")
        self.shown = self.shown.partition(text)[2]

    def send(self, text: str) -> None:
        os.write(self.file, f"{text}\n".encode())

    def wait(self) -> int:
        """The exit status."""
        with suppress(OSError):
            while os.read(self.file, 4096):
                pass
        os.close(self.file)
        return self.process.wait(30)


def wait_for(port: int) -> None:
    """Until a server listens."""
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise TimeoutError(port)


def ask(url: str, body: dict) -> dict:
    """The answer to a request, once the server is there."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
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
    out = AutoModelForCausalLM.from_pretrained(model).generate(
        ids, max_new_tokens=8, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
