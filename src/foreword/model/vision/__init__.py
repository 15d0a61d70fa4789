"""The vision halves of models. They turn pictures into rows, which enter a decoder's first layer."""
