"""Anthropic's API: messages, their tokens counted, models."""
