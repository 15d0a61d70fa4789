"""What the cache would do for recorded traffic, worked out without a model."""
