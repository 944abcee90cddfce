"""Independent evaluations that the tests compare against. Nothing here imports the package under test."""
