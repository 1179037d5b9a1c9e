"""What the benchmarks compare with: the public formulations, padded and eager, pinned by tests/benchmarks.

They are given their best: rows padded to the longest of the batch instead of to the cap, GEMMs on the real tokens only
(as the public research code has them), the tuned allocator, a fused AdamW, batches that are padded beforehand.
"""
