"""Decoders that are written down: a family is a table of facts and a map of weights, and one formula runs them all."""
