"""The store tier: blocks in a Valkey or Redis server that machines share."""
