"""Lint: finds out why prompts that should share a beginning differ early, and how much a remedy would save."""
