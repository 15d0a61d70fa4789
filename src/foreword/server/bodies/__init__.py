"""Bodies of requests: limits on their contents, JSON read and written in pieces, work off the event loop."""
