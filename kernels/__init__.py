"""Triton kernels: one file per operator, a plain torch twin beside each.

The folder is installed as `jetrl_megatron.kernels`. A kernel and its twin give the same bytes, and take every constant
from the recipe that they are called with.
"""
