"""The demo: an embedded model that answers from its prompt, and four workloads for it."""
