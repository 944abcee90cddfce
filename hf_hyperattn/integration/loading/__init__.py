"""Names of attention, and loading, checking and saving of patched models."""
