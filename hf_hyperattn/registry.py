"""Public names of the registry of mechanisms; it lives in `config.registry`."""

from .config.registry import MECHANISMS, STAGES, Mechanism, get_mechanism, on_register, register

__all__ = ["MECHANISMS", "STAGES", "Mechanism", "get_mechanism", "on_register", "register"]
