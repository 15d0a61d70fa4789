"""Access: tenants, operators, quotas, and prefixes that all tenants share."""
