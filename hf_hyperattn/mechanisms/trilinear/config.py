"""The config of trilinear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from ...config.fields import MOST_INTEGER, refuse

Form = Literal["simplicial", "bidaf"]
FORMS = get_args(Form)
Product = Literal["identity", "distmult", "cp"]
PRODUCTS = get_args(Product)


@dataclass(frozen=True)
class TrilinearConfig(MechanismConfig):
    """Trilinear attention: logits from three vectors.

    Three-way attention is from arXiv 1909.00668 and 2507.02754, BiDAF's score from arXiv
    1611.01603.
    """

    mechanism = "trilinear"

    form: Form = option(
        "simplicial",
        "simplicial: a query attends to pairs of keys; bidaf: pairs, with linear terms and learned weights",
        choices=FORMS,
    )
    windows: tuple[int | None, ...] | None = option(
        (512, 32),
        "simplicial: numbers of keys j and k that a query sees, looking back if causal, else to both sides; "
        "None for one number, or for both, means all keys",
        symbol="w1, w2",
        types=(tuple,),
        optional=True,
    )
    tensor: Product = option(
        "identity",
        "simplicial: tensor of the product of q, k and k2: identity; distmult: a learned diagonal; "
        "cp: a learned sum of `rank` products",
        symbol="T",
        choices=PRODUCTS,
    )
    rank: int | None = option(
        None,
        "tensor='cp': number of products, from 1 to the head dimension; None: the head dimension, which starts as the "
        "identity",
        symbol="R",
        types=(int,),
        least=1,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "windows", check_windows("TrilinearConfig.", self.windows))
        if self.rank is not None and self.tensor != "cp":
            self._refuse("rank", "None with tensor other than 'cp'")
        # The default windows are accepted here: the user did not choose them.
        if self.form == "bidaf":
            if self.tensor != "identity":
                self._refuse("tensor", "'identity' with form='bidaf', which has no tensor")
            if self.windows not in ((512, 32), None):
                self._refuse("windows", "None with form='bidaf', which has no windows")

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that it changes."""
        # Three-way attention also decides which keys are visible and how values are averaged.
        return ("score",) if self.form == "bidaf" else ("score", "structure", "aggregation")

    @property
    def breaks(self) -> frozenset[str]:
        """Properties that the form removes for other mechanisms."""
        # BiDAF's score is a product of query features and key features, as other scores may be.
        if self.form == "bidaf":
            return frozenset()
        return frozenset({"linear_in_key", "pairwise_logits"})

    @property
    def needs(self) -> dict[str, str]:
        """Properties that it relies on: the softmax must ignore the row term w_1·q."""
        return {"free_of_rows": "weights of keys would change what a softmax does not see of w_1·q"}


def check_windows(owner: str, windows) -> tuple[int | None, int | None] | None:
    """Return the windows (w1, w2), or None if both are None.

    Raises:
        ValueError: The value is not a pair of positive integers or None.
    """
    if windows is None:
        return None
    # JSON turns tuples into lists.
    is_pair = isinstance(windows, tuple | list) and len(windows) == 2
    if not is_pair or not all(
        w is None or (type(w) is int and 1 <= w <= MOST_INTEGER) for w in windows
    ):
        allowed = (
            f"(w1, w2), each an integer from 1 to {MOST_INTEGER:,} or None for all keys; or None"
        )
        refuse(f"{owner}windows", windows, allowed)
    return None if tuple(windows) == (None, None) else tuple(windows)
