"""Bodies of requests: their common fields, limits on their contents, and the reading and writing of JSON."""
