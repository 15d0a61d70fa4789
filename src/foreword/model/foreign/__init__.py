"""Models that run in transformers' own modules: how they are called, probed, and given foreword's attention."""
