"""The demo: an embedded model that reads its prompt, three workloads for it, and what they show."""
