"""The road table: every mechanism by every road that the ecosystem offers; none may change in silence."""
