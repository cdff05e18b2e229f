# Source this before a run on NVIDIA GPUs: `. gpu/env.sh`. Your own XLA_FLAGS come last and so win.
# Every flag is one that jax 0.10 to 0.12 know: an unknown one aborts the process (tests/launch checks).
_flags=""
# What puts collectives behind computation. A run of one GPU has none, and would pay 1 GiB of gemma4-31b and a third of its
# compilation for it.
if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -ne 1 ] || [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
  _flags+=" --xla_gpu_enable_latency_hiding_scheduler=true"
  # One collective for many small arrays: 128 MiB, about a layer of a 4B model.
  _flags+=" --xla_gpu_all_gather_combine_threshold_bytes=134217728"
  _flags+=" --xla_gpu_reduce_scatter_combine_threshold_bytes=134217728"
  _flags+=" --xla_gpu_all_reduce_combine_threshold_bytes=134217728"
  # Two buffers for the arrays of a loop, so that the next layer is gathered while this one is computed.
  _flags+=" --xla_gpu_enable_while_loop_double_buffering=true"
fi
export XLA_FLAGS="${_flags# }${XLA_FLAGS:+ $XLA_FLAGS}"
# Of the device's memory JAX takes this share at once; the rest is for NCCL, cuDNN and the driver.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
unset _flags
