"""The native back end: the C++ kernels of `native/`, reached through ctypes."""
