"""Blocks of the KV memory: who holds them, which hold what, and the tables of running requests."""
