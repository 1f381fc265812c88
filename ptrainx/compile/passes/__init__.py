"""The passes, in the order in which they run. Each takes a graph and returns one; `check_legal` follows each.

| pass | what it does |
|---|---|
| `functionalize` | operators that write in place become operators that do not |
| `drop_identities` | detach, alias and views that change nothing |
| `share_common` | what is computed twice is computed once |
| `drop_dead` | what nobody reads, collectives included |
| `narrow_random` | a random draw of which a rank keeps a slice becomes a draw of the slice |
| `bucket_reductions` | asked all-reduces over one axis share a flat buffer |
| `issue_early` | collectives start as soon as their operands exist, and are waited for as late as they can be |
"""

from ptrainx.compile.passes.pipeline import PASSES, run_passes

__all__ = ["PASSES", "run_passes"]
