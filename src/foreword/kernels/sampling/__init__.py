"""Draws of tokens from rows of logits on the CPU, without sorting them."""
