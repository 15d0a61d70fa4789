"""The model package: loading, attention over paged KV, sampling. Only this package and `kernels/` import torch."""
