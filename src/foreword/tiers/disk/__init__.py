"""The disk tier: blocks in append-only segment files that outlive the process."""
