"""recipes/finetune.py under Accelerate's FSDP2 on CPUs, which Accelerate itself offers for accelerators only."""

import runpy
import sys

import accelerate.state
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from .tiny import SCRIPT

begin = accelerate.state.AcceleratorState.__init__


def begin_with_fsdp(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # as the launcher's config says
        assert self.fsdp_plugin.fsdp_version == 2


accelerate.state.AcceleratorState.__init__ = begin_with_fsdp
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
