"""A runner for CUDA devices: one copy a step, recorded decode steps, memory measured at load."""
