"""Run in a process of its own: saves a patched model over an older checkpoint, and is killed at a given point.

python saves.py DIRECTORY write N      killed when the N-th file of weights has been half written
python saves.py DIRECTORY move 0       killed when everything is written, before anything is moved
"""

import os
import signal
import sys

import torch
from transformers import modeling_utils

import hf_hyperattn as ha
from hf_hyperattn.integration import saving
from tests.integration.models import llama, perturb

directory, moment, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(1)
model = ha.patch_model(llama(), ha.ConeConfig())
perturb(model)
written = 0
plain_save = modeling_utils.safe_save_file


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def save_file(tensors, filename, *args, **kwargs):
    global written
    written += 1
    plain_save(tensors, filename, *args, **kwargs)
    if written == count:
        os.truncate(filename, os.path.getsize(filename) // 2)
        die()


if moment == "write":
    modeling_utils.safe_save_file = save_file
else:
    saving.os.fsync = die
model.save_pretrained(directory, max_shard_size="10KB")
print("not killed")
