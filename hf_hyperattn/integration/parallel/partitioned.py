"""Keep added parameters gathered under DeepSpeed's ZeRO-3 while attention reads them.

ZeRO-3 gathers the parameters of a module when it is called, and releases them when it returns. The
layers of mechanisms return a plan, which reads their parameters later. So the module that runs the
plan registers the parameters of all its layers as its own.
"""

from __future__ import annotations

import importlib

from torch import nn

#: Attribute that DeepSpeed's ZeRO-3 sets on the parameters that it partitions, and on their modules.
PARTITIONED = "ds_id"
#: Attribute of a module whose layers' parameters are registered.
REGISTERED = "_hyperattn_registered"


def register_parameters(hyper: nn.Module) -> bool:
    """Tell DeepSpeed that a module reads the parameters of all its layers.

    Args:
        hyper: The module, partitioned by ZeRO-3.

    Returns:
        Whether parameters were registered now, and not before.
    """
    if REGISTERED in hyper.__dict__:
        return False
    hyper.__dict__[REGISTERED] = True
    # DeepSpeed is loaded already, since it has partitioned the module.
    zero = importlib.import_module("deepspeed").zero
    parameters = list(hyper.parameters())
    for parameter in parameters:
        zero.register_external_parameter(hyper, parameter)
    return bool(parameters)
