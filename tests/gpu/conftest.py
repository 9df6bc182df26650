"""The Triton back end without a GPU, in two processes of their own.

Whether kernels are interpreted or compiled is decided when triton is first imported, and other tests import it (through
transformers). So `interpreted/` is collected only where TRITON_INTERPRET=1 was set from the start:

    TRITON_INTERPRET=1 python -m pytest tests/gpu

Otherwise test_gpu_processes.py runs it that way.
"""

import os

collect_ignore = ["test_gpu_processes.py"] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
