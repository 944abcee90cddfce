"""Patched models on several devices: tensor parallelism, offloaded weights, refused sharding."""
