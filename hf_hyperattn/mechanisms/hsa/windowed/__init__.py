"""Tie keys over windows of tokens.

This module shows how a call reaches the compiled CPU kernel, and when plain torch computes it
instead.
"""
