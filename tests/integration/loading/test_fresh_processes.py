"""A patched model that is loaded in a fresh process computes what it computed in others, bit for bit.

Memory is filled with other bytes in each process, so that a number read before it is written shows.
"""

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.engines import cpu, dense
from tests.integration.models import SEQ2SEQ, llama, perturb

ROOT = Path(__file__).resolve().parents[3]


def half():
    """A Llama in bfloat16, its buffers in float32 as a loaded model's."""
    return hf.AutoModelForCausalLM.from_config(llama().config, dtype=torch.bfloat16)


#: The stock model, and what is patched in.
MODELS = {
    "BART, cone": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)),
        ha.ConeConfig(),
    ),
    "BART, HyPE": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)),
        ha.HypeConfig(),
    ),
    "cone": (llama, ha.ConeConfig()),
    "HyPE": (llama, ha.HypeConfig()),
    "hyperbolic": (lambda: llama(num_attention_heads=2), ha.HyperbolicConfig()),
    "HSA": (llama, ha.HsaConfig(near=9, sinks=2, refine_top_k=2)),
    "bfloat16": (half, ha.ConeConfig()),
}


def digests(model) -> list[str]:
    """Of the logits of some lengths, one by one and together, with a cache, and of the gradients of two threads."""
    found = []
    say = lambda t: found.append(
        hashlib.sha256(t.detach().float().numpy().tobytes()).hexdigest()[:16]
    )
    for batch, length in ((1, 1), (1, 150), (3, 77)):
        ids = torch.arange(batch * length).reshape(batch, length) * 7 % 90 + 3
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.arange(length).ge(torch.arange(batch)[:, None] * 5).long(),
        }
        with torch.no_grad():
            say(model(**inputs).logits)
            made = model.generate(
                **inputs,
                max_new_tokens=3,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        say(torch.cat(made.logits))
    model(**inputs, labels=ids).loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            say(p.grad)
    return found


def work(folder: Path) -> None:
    """Load each model and print what it computes; as it lies in the file, and moved to memory of its own."""
    dense.COMPILED = dense.DECODED = 0  # the compiled engine, however small a call is
    assert cpu.library.core()
    for n, (make, _) in enumerate(MODELS.values()):
        cls = type(make())
        model = cls.from_pretrained(folder / str(n)).eval()
        moved = copy.deepcopy(model)
        print(n, "mapped", *digests(model))
        print(n, "moved", *digests(moved))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fresh_processes_agree_bit_for_bit(tmp_path):
    if cpu.library.core() is None:
        pytest.skip("no C++ compiler")
    for n, (make, config) in enumerate(MODELS.values()):
        torch.manual_seed(n)
        model = ha.patch_model(make().eval(), config)
        perturb(model)
        model.save_pretrained(tmp_path / str(n))
    said = []
    for byte in ("85", "170"):  # all bits differ
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "MALLOC_PERTURB_": byte,
            "OMP_WAIT_POLICY": "passive",
        }
        command = [
            sys.executable,
            "-m",
            "tests.integration.loading.test_fresh_processes",
            str(tmp_path),
        ]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr[-4000:]
        said.append([line for line in done.stdout.splitlines() if line[:1].isdigit()])
    assert len(said[0]) == 2 * len(MODELS)
    for name, *lines in zip([name for name in MODELS for _ in range(2)], *said, strict=True):
        assert len(set(lines)) == 1, f"{name}:\n" + "\n".join(lines)


@pytest.mark.slow
def test_a_reloaded_model_in_memory_of_its_own_agrees_bit_for_bit(tmp_path):
    """Where a file is mapped, its tensors lie at odd addresses; products of single rows round otherwise there, those of
    the stock model too. With tensors that lie as the first model's do, nothing is left of that.
    """
    for name, (make, config) in MODELS.items():
        model = ha.patch_model(make().eval(), config)
        perturb(model)
        model.save_pretrained(tmp_path / name)
        again = copy.deepcopy(type(model).from_pretrained(tmp_path / name).eval())
        assert digests(again) == digests(copy.deepcopy(model)), name


if __name__ == "__main__":
    torch.set_num_threads(2)
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    work(Path(sys.argv[1]))
