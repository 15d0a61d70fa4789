"""The model package: loading, attention over paged KV, sampling. Besides it, only `kernels/` imports torch."""
