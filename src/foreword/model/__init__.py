"""The model room, the only one that imports torch: loading, attention over paged KV, sampling."""
