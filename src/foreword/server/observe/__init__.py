"""What the server tells of its engine and its traffic: metrics, logs, traces, records."""
