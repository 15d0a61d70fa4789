"""Access: tenants and their quotas, shared prefixes, operators, and the adapters and links that clients may use."""
