"""Plain data for cards: what a patched model's config.json holds, and one measured number."""

SPEC = {
    "format": 1,
    "mode": "blend",
    "mechanisms": [
        {"mechanism": "cone", "variant": "umbral", "mapping": None, "gamma": 0.5, "radius": 1.0},
        {"mechanism": "hype", "slopes": "alibi", "max_length": 4096},
    ],
    "layers": None,
    "hosts": [f"model.layers.{index}.self_attn" for index in (3, 4, 5, 9)],
    "heads": [0, 1, 2, 7],
}
RESULT = {
    "metric": "perplexity",
    "value": 12.5,
    "base_value": 12.25,
    "dataset": "a text",
    "command": "make recipe",
    "machine": "2 cores",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["v_proj", "q_proj"],
    "modules_to_save": ["hyper"],
    "base_model_name_or_path": "org/base",
}
