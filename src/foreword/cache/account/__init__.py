"""Accounts of what the cache holds, held and saved."""
