"""Tie keys over windows of tokens.

A reader learns here how a call reaches the compiled CPU kernel, and when plain torch computes it
instead.
"""
