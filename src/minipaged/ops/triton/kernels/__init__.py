"""GPU kernels in Triton, to be read beside `ops/reference.py`.

`cache_write` and `decode_attention` are the article's CUDA path; `varlen_attention` is chunked prefill; `dense` holds
the fused operations between the matrix products. `launch` says how a kernel is started, `tuning` with which tile sizes.
Each kernel file ends in functions that turn tensors into a `Launch`, which runs at once on a GPU, under
`TRITON_INTERPRET=1` on the CPU, and can be compiled ahead of time without either.
"""
