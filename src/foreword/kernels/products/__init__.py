"""Products with packed weights: in 12 bits, in the codes of a file, or of low rank."""
