"""The halves of models that see. They turn pictures into rows, which enter a decoder's first layer."""
