"""Bodies: how much one may hold, JSON read and written in pieces, work off the event loop."""
