"""The flag for programs that can say what they would do."""

from absl import flags

DRY_RUN = flags.DEFINE_bool(
  "dry_run",
  False,
  "Say what the run would cost in tokens, bytes and, from a few contexts, "
  "minutes; write nothing.",
)
