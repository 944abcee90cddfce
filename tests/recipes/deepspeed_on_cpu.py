"""recipes/finetune.py under Accelerate's DeepSpeed on CPUs, which Accelerate itself offers for accelerators only."""

import os
import runpy
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import accelerate.state
from accelerate.utils import DistributedType

from .tiny import SCRIPT

begin = accelerate.state.AcceleratorState.__init__


def begin_with_deepspeed(self, *args, deepspeed_plugin=None, **kwargs):
    begin(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.DEEPSPEED
        self.deepspeed_plugins = deepspeed_plugin  # as the launcher's config says


accelerate.state.AcceleratorState.__init__ = begin_with_deepspeed
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
