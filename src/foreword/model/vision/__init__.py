"""The halves of models that see: pictures to rows that enter a decoder's first layer."""
