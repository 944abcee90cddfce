"""Export checkpoints with remote code, and kernel repositories."""
