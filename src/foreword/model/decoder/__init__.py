"""foreword's own decoders: a family is a table of facts and a map of weights, and one formula runs all families."""
