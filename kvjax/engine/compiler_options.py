"""Options of XLA's compiler for programs that decode."""

from kvjax.kernels.dispatch import target_platform

# A step multiplies a few rows by all weights. Of Triton's products, XLA first
# copies the weights of a layer out of their stack, which triples the bytes that
# move; cuBLAS's read them in place. Products of the same rows are not merged,
# as that would concatenate their weights in every step.
_GPU = {
  "xla_gpu_enable_triton_gemm": False,
  "xla_gpu_dot_merger_threshold_mb": 0,
}


def decoding_options() -> dict[str, bool | int] | None:
  """Returns options for `jax.jit` on the platform that is compiled for."""
  return dict(_GPU) if target_platform() == "gpu" else None
