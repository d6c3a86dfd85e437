"""The reference backend with the fusions of a GPU."""

from __future__ import annotations

from jetrl_megatron.ops.backends import ReferenceQuantizer


class FusedReference(ReferenceQuantizer):
    """The reference with norm and SwiGLU between the linears in codes, as on a GPU."""

    fused = True
