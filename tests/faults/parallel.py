"""One of two processes that hold a model together by tensor parallelism, and save it together, twice.

python -m tests.faults.parallel FOLDER     (RANK, LOCAL_RANK, WORLD_SIZE in the environment)
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import hf_hyperattn  # noqa: F401  registers the names
from hf_hyperattn.utils.files import PREFIX

folder = Path(sys.argv[1])
torch.set_num_threads(1)
ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", **ranks)
model = LlamaForCausalLM.from_pretrained(folder / "before", tp_plan="auto")
assert model._tp_size == 2 and any(type(p).__name__ == "DTensor" for p in model.parameters())
assert model.config._attn_implementation == "cone"
for _ in range(2):
    model.save_pretrained(folder / "after")
    # No barrier of ours: whoever comes back finds the whole checkpoint.
    assert (folder / "after" / "model.safetensors").is_file() and (
        folder / "after" / "config.json"
    ).is_file()
    dist.barrier()
assert not [p for p in folder.iterdir() if p.name.startswith(PREFIX)]
sys.stdout.flush()
os._exit(0)
