"""`foreword watch`: shows the content and the hits of a running engine's cache, in a terminal or a browser."""
