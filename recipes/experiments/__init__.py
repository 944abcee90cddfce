"""Small, seeded, resumable experiments on questions that the papers leave open; see docs/results/experiments.md."""
