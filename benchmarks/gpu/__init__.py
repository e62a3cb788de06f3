"""Decoding of real model shapes on a GPU, beside the recorded figures of other engines."""
