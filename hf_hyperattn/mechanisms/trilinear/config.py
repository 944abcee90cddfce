"""Configuration of trilinear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from ...fields import MOST_INTEGER, refuse

Form = Literal["simplicial", "bidaf"]
FORMS = get_args(Form)
Product = Literal["identity", "distmult", "cp"]
PRODUCTS = get_args(Product)


@dataclass(frozen=True)
class TrilinearConfig(MechanismConfig):
    """Trilinear attention: logits from three vectors (arXiv 1909.00668, 2507.02754), or BiDAF's (arXiv 1611.01603)."""

    mechanism = "trilinear"

    form: Form = option(
        "simplicial",
        "simplicial: a query attends to pairs of keys; bidaf: pairs, with linear terms and learned weights",
        choices=FORMS,
    )
    windows: tuple[int | None, ...] | None = option(
        (512, 32),
        "simplicial: how many keys j and k a query sees, looking back where attention is causal, else to either side; "
        "None in place of a number, or of both, for all keys",
        symbol="w1, w2",
        types=(tuple,),
        optional=True,
    )
    tensor: Product = option(
        "identity",
        "simplicial: of the product of q, k and k2: identity; distmult: a diagonal one, learned; cp: a sum of `rank` "
        "products, learned",
        symbol="T",
        choices=PRODUCTS,
    )
    rank: int | None = option(
        None,
        "tensor='cp': number of products, from 1 to the head dimension; None: the head dimension, at which it "
        "starts as the identity",
        symbol="R",
        types=(int,),
        least=1,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "windows", checked_windows("TrilinearConfig.", self.windows))
        if self.rank is not None and self.tensor != "cp":
            self._refuse("rank", "None with tensor other than 'cp'")
        if self.form == "bidaf":
            if self.tensor != "identity":
                self._refuse("tensor", "'identity' with form='bidaf', which has no tensor")
            if self.windows not in ((512, 32), None):
                self._refuse("windows", "None with form='bidaf', which has no windows")

    @property
    def stages(self) -> tuple[str, ...]:
        """bidaf is a score; simplicial also decides what is attended to and how values are averaged."""
        return ("score",) if self.form == "bidaf" else ("score", "structure", "aggregation")

    @property
    def positional(self) -> bool:
        """Windows are counted in tokens."""
        return self.windows is not None

    @property
    def breaks(self) -> frozenset[str]:
        """BiDAF's score is a product of features; the others' logits are of three tokens."""
        return (
            frozenset() if self.form == "bidaf" else frozenset({"linear_in_key", "pairwise_logits"})
        )

    @property
    def needs(self) -> dict[str, str]:
        """Softmax does not see w_1·q."""
        return {"free_of_rows": "weights of keys would change what a softmax does not see of w_1·q"}


def checked_windows(owner: str, windows) -> tuple[int | None, int | None] | None:
    """(w1, w2), or None where both are None.

    Raises:
        ValueError: not two of integers from 1 and None.
    """
    if windows is None:
        return None
    fine = isinstance(windows, tuple | list) and len(windows) == 2
    if not fine or not all(
        w is None or (type(w) is int and 1 <= w <= MOST_INTEGER) for w in windows
    ):
        allowed = (
            f"(w1, w2), each an integer from 1 to {MOST_INTEGER:,} or None for all keys; or None"
        )
        refuse(f"{owner}windows", windows, allowed)
    return None if tuple(windows) == (None, None) else tuple(windows)
