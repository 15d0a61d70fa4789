"""Upkeep of a cache directory from outside: what lies in it, whether it is sound, and what can go."""
