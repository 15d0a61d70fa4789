"""Who may do what: tenants, operators, quotas, and prefixes that all tenants share."""
