"""The flag for files that register methods and families of models."""

from absl import flags

PLUGINS = flags.DEFINE_list(
  "plugins",
  None,
  "Python files of your own that register methods by kvjax.register, what "
  "stands before methods by kvjax.register_prefix, or families of models by "
  "kvjax.models.register.",
)
