"""A runner for CUDA devices: it copies a batch to the device once per step, replays recorded decode steps, and measures
memory when the model is loaded.
"""
