"""What `recipes/finetune.py` is made of: settings, text, models, the run, its report."""
