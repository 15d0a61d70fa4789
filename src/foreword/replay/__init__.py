"""Replay: simulates the cache on recorded traffic, without a model."""
