"""Selection: where the tokens of a call stand, and the state that a cache keeps.

HSA and sparse rules share this package.
"""
