"""Many engines: what their caches hold, told to others."""
