"""Drafts: guesses at the next tokens of running requests, which a step checks all at once."""
