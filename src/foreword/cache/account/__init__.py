"""Records which keys the cache holds and held, and how many tokens its hits saved."""
