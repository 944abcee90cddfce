"""Somebody without the plugin loads what it published; ``patched.py`` has to have run against the same Hub."""

from common import refused, report
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    report(
        {
            "model": refused(lambda: AutoModelForCausalLM.from_pretrained("tester/patched")),
            "adapter": refused(lambda: AutoModelForCausalLM.from_pretrained("tester/patched-lora")),
        }
    )
