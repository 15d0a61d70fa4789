"""Options: what a user may set, as flags, keys of config files, keywords and vLLM's names. Knows no option by name."""
