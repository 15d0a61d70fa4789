"""The model room: loading, attention over paged KV, sampling. Beside it, only `kernels/` imports torch."""
