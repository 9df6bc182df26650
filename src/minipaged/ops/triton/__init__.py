"""The back ends for GPUs: Triton kernels, and FlashInfer's attention beside them."""
