"""Requests that wait, and which of them goes next.

Knows requests, block keys and tokens; knows nothing of batches, blocks or rows.
"""
