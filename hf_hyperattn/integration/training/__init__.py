"""Help for training: parameter groups, a LoRA config, logs of gates, batches with hierarchies."""
