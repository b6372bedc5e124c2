"""Checks the installed methods as their authors would."""

import kvjax
from kvjax.testing import check_method, check_retrieval

if __name__ == "__main__":
  check_method(kvjax.get_method("last_votes:window=4"))
  check_method(kvjax.get_method("flipped/keydiff"))
  check_retrieval(kvjax.get_retrieval("mean_query.near"))
  print("all checked")
