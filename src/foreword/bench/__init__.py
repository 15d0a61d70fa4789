"""Measurements that drive the engine with recorded traffic."""
