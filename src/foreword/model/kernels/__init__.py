"""Attention over paged KV: one signature, several implementations, one contract test."""
