"""The flag for files that register methods."""

from absl import flags

PLUGINS = flags.DEFINE_list(
  "plugins",
  None,
  "Python files of your own that register methods by kvjax.register.",
)
