"""Multiple kernel learning: heads as kernels with learned weights, global or from the tokens, or summed into one."""

from ...registry import Mechanism, register
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
