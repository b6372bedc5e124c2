"""The learned gates of SmolLM2-135M-Instruct, as kvpress and kvjax read them.

kvpress_smollm2/kvzap_linear and kvzap_mlp were trained as `kvjax train_gate`
does, in six parts of kvjax's documentation, of up to 600 tokens: with
--kind=linear, and with --hidden=8, so that the file is small. In a seventh
part, R2 is 0.56 and 0.55 on average over the layers. kvjax does not train the
gates of Fast KVzip: theirs are random numbers.
"""

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent / "support"))
import made_up_gates  # noqa: E402

KVZAP = {
  kind: HERE / "kvpress_smollm2" / f"kvzap_{kind}" for kind in ("linear", "mlp")
}
LAYERS, HEADS, WIDTH = 30, 3, 576
# What DMSPress has in place of shares; about so much is removed.
THRESHOLDS = {0.5: -3.8, 0.75: -1.4}
# Queries of a KV head; numbers of a query, and learned keys, as in the
# published files.
_GROUP, _SIZE, _SINKS = 3, 16, 16


def fast_kvzip_layers() -> list[dict[str, np.ndarray]]:
  """Weights of the gates of Fast KVzip, by layer and name."""
  return made_up_gates.fast_kvzip_layers(
    *(WIDTH, HEADS, LAYERS), group=_GROUP, size=_SIZE, sinks=_SINKS
  )


def fast_kvzip_file() -> bytes:
  """The same as a file that its authors' training would write."""
  return made_up_gates.torch_bytes({"module": fast_kvzip_layers()})
