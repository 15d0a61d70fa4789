"""Checkpoints: reading configs and weights, and writing random ones."""
