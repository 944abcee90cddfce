"""Multiple kernel learning (MKL): attention heads as kernels with learned weights.

Weights are global or computed from the tokens. The weighted kernels can be summed into one
attention.
"""

from ...config.registry import Mechanism, register
from .config import MklConfig
from .functional import mkl_attention
from .layer import MklLayer

register(
    Mechanism(
        name="mkl",
        stage="mixing",
        paper="Multiple kernel learning (Goenen and Alpaydin, JMLR 12, 2011), heads as kernels",
        config=MklConfig,
        layer=MklLayer,
        functions={"mkl_attention": mkl_attention},
    )
)
