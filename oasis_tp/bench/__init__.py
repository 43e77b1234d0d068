"""Measurements, and the demo: they compose the product and are imported by none of it."""
