"""Parity: how far an engine's answers are from the reference's, in dB and in tokens."""
