"""The passes, in the order in which they run. Each takes a graph and returns one; `check_legal` follows each.

| pass | what it does | promises |
|---|---|---|
| `defer_loop_sums` | all-reduces that a loop's carry adds up are taken once, after the loop | close |
| `functionalize` | operators that write in place become operators that do not | every bit |
| `recompute` | what a remat does not keep is computed again for the backward | every bit |
| `drop_identities` | detach, alias and views that change nothing | every bit |
| `share_common` | what is computed twice is computed once, unless a remat means it | every bit |
| `drop_dead` | what nobody reads, collectives included | every bit |
| `narrow_random` | a random draw of which a rank keeps a slice becomes a draw of the slice | every bit |
| `share_gathers` | one gather for all that gather the same, through views and casts | every bit |
| `cancel_gathers` | gathers of what was just scattered or cut, cuts of what was just gathered | close |
| `scatter_reductions` | all-reduces of which a rank keeps its own part become reduce-scatters | close |
| `merge_sums` | a sum of all-reduces becomes the all-reduce of a sum | close |
| `flatten_axes` | collectives over one axis after another become one over both | close |
| `drop_dead` | again | every bit |
| `bucket_collectives` | asked collectives over one axis share a flat buffer | close |
| `issue_early` | collectives start early and are waited for late, within bounds on memory | every bit |

On the body of a loop they run before they run on what is around it. "Close": sums may be taken in another order.
"""

from ptrainx.compile.passes.one_pass import Pass
from ptrainx.compile.passes.pipeline import PASSES, register_pass, run_passes

__all__ = ["PASSES", "Pass", "register_pass", "run_passes"]
