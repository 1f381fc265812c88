"""Where the parameters of these models lie: heads, hidden units and the head's vocabulary are split over `model`.

Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from ptrainx import P

__all__ = ["RULES"]

RULES = [
    (r"^layers/\d+/(q|k|v|gate|up)$", P(None, "model")),
    (r"^layers/\d+/(q|k|v|gate|up)_bias$", P("model")),
    (r"^layers/\d+/(o|down)$", P("model")),
    (r"^layers/(q|k|v|gate|up)$", P(None, None, "model")),
    (r"^layers/(q|k|v|gate|up)_bias$", P(None, "model")),
    (r"^layers/(o|down)$", P(None, "model")),
    (r"^head$", P(None, "model")),
    (r".*", P()),
]
"""For `px.match_rules`, layers as a list or stacked. More can be split over `data`, as in ZeRO."""
