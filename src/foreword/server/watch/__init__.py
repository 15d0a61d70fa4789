"""`foreword watch`: what the cache of a running engine holds and brings, in a terminal or a browser."""
