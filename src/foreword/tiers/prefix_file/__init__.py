"""Prefix files: the cached blocks of one prompt in one file, which another cache of the same model can take."""
