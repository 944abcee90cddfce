"""What `benchmarks/run.py` is made of: a registry of operations, the cases they are measured on, and the page."""
