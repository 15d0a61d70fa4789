"""Anthropic's API: messages, counts of their tokens, and models."""
