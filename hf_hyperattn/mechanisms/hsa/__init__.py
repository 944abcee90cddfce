"""Hierarchical Self-Attention (arXiv 2509.15448)."""
