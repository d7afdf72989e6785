"""Networks: backbones in named stages, poolings, heads and attention."""
