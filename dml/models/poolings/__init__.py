"""Poolings that torch.nn lacks: `[B,C,h,w]` to `[B,D]` or `[B,D,1,1]`; GSP compares them all (Table 6)."""
