"""The halves of models that see: pictures to rows that enter a decoder's first layer.

Knows pixels, encoders of transformers and their image processors; knows neither prompts nor requests.
"""
