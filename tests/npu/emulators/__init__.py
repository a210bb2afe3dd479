"""What the ops of torch_npu compute, written from their documentation; importing it registers all.

The arithmetic is float32 with one rounding of the result, unless the documentation says otherwise.
What an op leaves undefined is NaN here, or a large negative integer. What its documentation forbids
raises `rules.Unsupported`, where torch_npu itself would say nothing.
"""

from tests.npu.emulators import attention, cache, latent, moe, norms, quant, rope

__all__ = ["attention", "cache", "latent", "moe", "norms", "quant", "rope"]
