"""The back end in PyTorch operations: runs wherever PyTorch does."""
