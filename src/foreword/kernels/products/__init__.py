"""Products with weights packed in 12 bits."""
