"""Model classes of our own, and conversions to them: HAT, HsaEncoder, collaborative heads."""
