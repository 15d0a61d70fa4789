"""Drafts: guesses at the next tokens of running requests, which a step checks all at once.

Knows requests, token ids and the times of steps; knows neither tensors nor blocks.
"""
