"""The demo: an embedded model that answers from its prompt, and three workloads for it."""
