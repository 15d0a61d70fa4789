"""Cache events: how an engine tells others which blocks it holds, and how they follow."""
