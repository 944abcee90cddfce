"""Parts that several sub-commands share: inputs, models, the console, the demo model."""
