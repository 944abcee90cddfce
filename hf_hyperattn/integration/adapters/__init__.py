"""PEFT adapters of patched models, and adapters that patch their base themselves."""
