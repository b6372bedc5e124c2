"""The presses of kvpress that are timed beside our methods.

It imports nothing, as kvpress runs in an environment without kvjax.
"""

# By the method's name in kvjax: the press, in those that wrap it.
PRESSES = {
  "random": ("RandomPress",),
  "streaming": ("StreamingLLMPress",),
  "key_norm": ("KnormPress",),
  "keydiff": ("KeyDiffPress",),
  "lagkv:lag=128": ("LagKVPress",),
  "compactor": ("CompactorPress",),
  "tova": ("TOVAPress",),
  "snapkv": ("SnapKVPress",),
  "pyramidkv": ("PyramidKVPress",),
  "adakv": ("AdaKVPress", "SnapKVPress"),
  "h2o": ("ObservedAttentionPress",),
}
