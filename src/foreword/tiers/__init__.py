"""What outlives the pool: whose KV a key names. Knows keys and bytes; knows no tensor and no request."""
