# Source this before a run on a TPU: `. tpu/env.sh`. It adds the flags of tpu/xla_flags.yml to LIBTPU_INIT_ARGS;
# your own flags in LIBTPU_INIT_ARGS come last and so win.
_here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
_flags="$(sed -n 's/^  \(xla_[a-z0-9_]*\): *\([^ ]*\).*$/--\1=\2/p' "$_here/xla_flags.yml" | tr '\n' ' ')"
export LIBTPU_INIT_ARGS="${_flags}${LIBTPU_INIT_ARGS:-}"
unset _here _flags
