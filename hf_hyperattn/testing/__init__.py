"""The contracts that mechanisms and engines keep, as a kit: for our own, and for those of other packages.

    import hf_hyperattn as ha, my_package
    ha.testing.check_mechanism("my_score")          # every contract, in tiny random models of nine families
    ha.testing.check_engine("my_engine")            # against `reference` in float64

In pytest, one test for each contract, family and setting:

    @pytest.mark.parametrize("check", ha.testing.mechanism_checks("my_score"), ids=str)
    def test_contract(check):
        check()

A mechanism that refuses some of the models says so, and any other refusal fails:

    ha.testing.check_mechanism("my_score", refuses={r".*-(gemma2|gpt_oss)": "softcap", "heads-.*": "changes all heads"})
"""

from .checks import ContractError
from .engines import check_engine, engine_checks
from .mechanisms import CONTRACTS, FAMILIES, check_mechanism, mechanism_checks

__all__ = ["CONTRACTS", "FAMILIES", "ContractError"]
__all__ += ["check_engine", "check_mechanism", "engine_checks", "mechanism_checks"]
