"""A kit that checks the contracts of mechanisms and engines, ours and yours.

Here you learn how to check what you registered, in one call or as tests.

    import hf_hyperattn as ha, my_package
    ha.testing.check_mechanism("my_score")     # all contracts, in tiny random models
    ha.testing.check_engine("my_engine")       # against `reference` in float64

In pytest, one test for each contract, family and setting:

    @pytest.mark.parametrize("check", ha.testing.mechanism_checks("my_score"), ids=str)
    def test_contract(check):
        check()

If a mechanism refuses some models, list them. Any other refusal fails:

    refuses = {r".*-(gemma2|gpt_oss)": "softcap", "heads-.*": "changes all heads"}
    ha.testing.check_mechanism("my_score", refuses=refuses)
"""

from .checks import ContractError
from .engines import check_engine, engine_checks
from .mechanisms import CONTRACTS, FAMILIES, check_mechanism, mechanism_checks

__all__ = ["CONTRACTS", "FAMILIES", "ContractError"]
__all__ += ["check_engine", "check_mechanism", "engine_checks", "mechanism_checks"]
