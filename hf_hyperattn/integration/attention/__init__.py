"""The attention call, from Transformers to an engine: `call_path.py` is the place to start."""
