"""Recipes of all names that tests of the contract are about, at small sizes."""

import dataclasses

from made_up_gates import made_up_fast_kvzip, made_up_kvzap

from kvjax.registry.names import get_recipe
from kvjax.registry.registry import METHODS

# What scores by another formula than a case beside it, or spreads its budget
# in another way, and does nothing else otherwise, takes its turn with the slow
# tests.
FORMULAS = [
  "h2o.keydiff",
  "h2o.compactor",
  "tova.keydiff",
  "snapkv.factory",
  "snapkv.compactor",
  "lagkv.local",
  "lagkv.kvpress:lag=5",
  "compactor.vllm:sketch_dim=6",
  "compactor.kvpress:sketch_dim=6",
  "protokv.kmeans:iterations=2",
  "key_norm.lagkv",
  "streaming:sinks=0",
  "keydiff:anchor=median_unit",
  "keydiff:anchor=median_raw:metric=dot",
  "keydiff:anchor=mean_raw:metric=euclid",
  "snapkv:group=max",
  "h2o:recent=8",
  "chunkkv:chunk=3",
  "lagkv:value_weight=0.0:ddof=0",
  "lagkv.kvpress:cross_scoring=true",
  "compactor.vllm:sketch=none",
  "compactor:solver=qr:sketch_dim=6",
  "protokv:cut=none:score=qk_mean",
  "protokv:score=attn_mean",
  "random:seed=3",
  "pyramid/keydiff",
  "pyramid/protokv",
  "ada/keydiff",
  "ada/snapkv.kvpress",
  "keydiff:anchor=pairwise",
  "lagkv.key_norm:skip_layers=0",
  "compactor:sketch=srht:value_norm=l1:pool=5",
  "compactor:attention=none",
  "compactor:solver=eig:center=true",
  "protokv:cut=position:split=ceil_len:sign=literal",
  "protokv:hash=hyperplane:include_self=false",
  "snapkv.keydiff",
  "h2o.kvpress",
  "protokv.chunk",
  "leverage.kvpress",
  "noncausal",
  "pyramidkv.kvpress",
  "adakv.kvpress",
  "cur.kvpress",
  "cur:leverage=mean:sketch=4",
  "expected_attention.kvpress",
  "expected_attention:covariance=false",
  "qfilters.kvpress",
  "criticalkv.kvpress",
  "criticaladakv.kvpress",
  "finch.kvpress",
  "ada/expected_attention",
  "ada/dropkv",
  "duoattention:share=0.4",
  "rkv.code",
  "triattention:ahead=max:group=mean:recent=5",
  "triattention:choice=model",
  "rkv:importance=1.0:kernel=1",
  "rkv:importance=0.0:spared=first:spared_share=0.2",
]
OPTIONS = [
  *FORMULAS,
  "keydiff:recent_frac=0.2",
  "chunkkv:scope=head",
  "adakv:alpha=0.5:normalize=true",
  "ada/protokv",
  "ada/chunkkv",
  "pyramid/ada/snapkv:window=4",
  "compactor:sketch=none",
  "protokv:cut=skip",
  "finch:chunk=16",
  "kvzap:level=head",
  "fast_kvzip:level=head",
]
# Their weights, which are made up here, are those of each head.
GATED = ("kvzap", "fast_kvzip")
# On rows this short the papers' sizes keep the newest tokens, or all of them,
# whatever the tokens are: names that say no sizes are given these.
SMALL = {
  "snapkv": {"window": 5},
  "pyramidkv": {"window": 5},
  "adakv": {"window": 5},
  "chunkkv": {"window": 5, "chunk": 4},
  "criticalkv": {"window": 5},
  "criticaladakv": {"window": 5},
  "dropkv": {"window": 5},
  "rkv": {"window": 5},
  "finch": {"window": 5},
  "duoattention": {"sinks": 3, "keep": 9},
  "simlayerkv": {"sinks": 3, "recent": 5},
  "lagkv": {"sinks": 2, "lag": 6},
  "compactor": {"chunk": 16},
  "noncausal": {"chunk": 16},
  "compactor.kvpress": {"chunk": 16, "first": 2, "last": 3},
  "compactor.vllm": {"chunk": 16, "leverage_chunk": 20, "first": 2, "last": 3},
  "kvzap": {"gate": made_up_kvzap(24, 3, 5)},
  "fast_kvzip": {"gate": made_up_fast_kvzip(24, 3, 5), "recent": 0.05},
  "protokv": {"window": 5, "prototypes": 20, "bits": 3},
  **{
    # They hash nothing.
    f"protokv.{preset}": {"window": 5, "prototypes": 20}
    for preset in ("kmeans", "sat", "squeezed")
  },
  "protokv.clusterkv": {
    **{"sinks": 2, "window": 5, "prototypes": 20, "tokens_per_prototype": 4}
  },
}


def base_of(name):
  """The registered name, and the preset with it if there is one."""
  preset = name.rpartition("/")[2].partition(":")[0]
  return preset.partition(".")[0], preset


def small(name):
  """The recipe of a name, with sizes that bite."""
  base, preset = base_of(name)
  sizes = SMALL.get(preset, SMALL.get(base, {}))
  own = [text.partition("=")[0] for text in name.split(":")[1:]]
  given = [f"{k}={v}" for k, v in sizes.items() if k not in own]
  recipe = get_recipe(":".join([name, *given]))
  # What rounds a budget chooses no tokens.
  return dataclasses.replace(recipe, rounding=None)


# Names of one and the same recipe are tested once.
CASES = {
  recipe: name
  for name in (*OPTIONS, *METHODS.presets, *METHODS)
  for recipe in [small(name)]
}
CASES = {name: recipe for recipe, name in CASES.items()}
