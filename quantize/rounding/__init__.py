"""Weight rounding, one file a method; every method gives a QuantisedWeight (quantize/grid.py)."""
