"""Accounts of the keys that the cache holds and held, and of the tokens that hits saved."""
