"""Selection: which keys each query attends to, and what is known of the calls that ask."""
