"""Lint: finds out why prompts that should share a beginning part early, and what mending that would save."""
