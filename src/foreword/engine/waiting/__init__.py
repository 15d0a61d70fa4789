"""Requests that wait, and which of them goes next."""
