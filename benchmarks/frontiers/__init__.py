"""What `benchmarks/frontier.py` is made of: the rules and methods, the cells, what rules cost, and the table."""
