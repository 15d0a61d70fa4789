"""Prompt modules: prompts of parts that are written once and reused, in a language of their own (PML)."""
