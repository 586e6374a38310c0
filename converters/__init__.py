"""Converters between the model and token files of other programs and those of llamajax."""
