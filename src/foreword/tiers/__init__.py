"""Tiers below the block pool: blocks on disk, in a store or in host memory, named by key and checked when they load."""
