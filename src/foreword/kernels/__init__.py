"""Attention over paged KV, and products with packed weights, on plain memory.

Kernels see addresses, shapes and strides; never a module, a request or a prefix. `select` chooses an attention kernel;
`reference` defines what each kernel must compute.
"""
