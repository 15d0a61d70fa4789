"""Observation of the engine and its traffic: metrics, logs, traces, records."""
