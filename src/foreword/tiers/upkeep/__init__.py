"""Commands for cache directories: they show what is in one, verify its blocks, delete segments, and import files."""
