"""The sub-commands of `hyperattn`, one module each: `run(args)` executes it."""
